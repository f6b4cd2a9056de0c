// SPDX-License-Identifier: Apache-2.0
//
// The elements of a band with one lane per strip, for the SIMD target being compiled.
//
// x[j][s] is element j of strip s (pool.h), so that sums along strips, blocks down the rows and
// codes need nothing across lanes. Strips that a band lacks have no elements; missing elements are
// zero.

#if defined(BACKFOLD_POOL_SIMD_BAND_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BACKFOLD_POOL_SIMD_BAND_INL_H_
#undef BACKFOLD_POOL_SIMD_BAND_INL_H_
#else
#define BACKFOLD_POOL_SIMD_BAND_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/simd/elements-inl.h"
#include "base/simd/transpose-inl.h"
#include "pool/geometry.h"

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
HWY_BEFORE_NAMESPACE();
namespace backfold::cpu {
namespace HWY_NAMESPACE {

// Places of a row of strips: a vector may start at the last strip.
constexpr int kStripRoom = core::kMaxStrips + 16;

template <typename T>
HWY_INLINE void load_run(const T* from, int count, float* to) {
  const DF d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  int i = 0;
  for (; i + lanes <= count; i += lanes) hn::StoreU(load_floats(d, from + i), d, to + i);
  for (; i < count; ++i) to[i] = core::to_float(from[i]);
}

template <typename T>
HWY_INLINE void store_run(const float* from, int count, T* to) {
  const DF d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  int i = 0;
  for (; i + lanes <= count; i += lanes) store_elements<false>(d, hn::LoadU(d, from + i), to + i);
  for (; i < count; ++i) to[i] = core::from_float<T>(from[i]);
}

class BandElements {
 public:
  explicit BandElements(const core::PoolShape& shape)
      : shape_(shape),
        joined_(shape.inner == 1 && shape.depth == 1 && shape.cuts == 1 &&
                shape.width % shape.block == 0),
        whole_(joined_ && shape.height % shape.tall == 0 && shape.block_rows % shape.group == 0) {}

  float* row(int j) { return x_[j]; }
  const std::uint8_t* elements() const { return elements_; }

  template <typename T>
  void load(const core::Band& band, const T* source) {
    if (!whole_) clear();
    for_lines(band, [&](const Line& line) HWY_ATTR {
      const T* from = source + line.first;
      if (shape_.inner == 1) {
        const float* values = line_;
        if constexpr (std::is_same_v<T, float>) {
          values = from;
        } else {
          load_run(from, line.count, line_);
        }
        const int strips = line.count / shape_.block, rest = line.count % shape_.block;
        transpose(values, shape_.block, strips, shape_.block, x_[0] + line.strip, kStripRoom);
        for (int j = 0; j < rest; ++j)
          x_[j][line.strip + strips] = values[strips * shape_.block + j];
        mark(line.strip, strips, shape_.block);
        if (rest != 0) mark(line.strip + strips, 1, rest);
      } else {
        for (int j = 0; j < line.width; ++j)
          load_run(from + j * shape_.inner, line.count, x_[j] + line.strip);
        mark(line.strip, line.count, line.width);
      }
    });
  }

  // Which strips there are; for a band that is to be stored.
  void mark_strips(const core::Band& band) {
    if (!whole_) clear();
    for_lines(band, [&](const Line& line) {
      if (shape_.inner != 1) return mark(line.strip, line.count, line.width);
      const int strips = line.count / shape_.block, rest = line.count % shape_.block;
      mark(line.strip, strips, shape_.block);
      if (rest != 0) mark(line.strip + strips, 1, rest);
    });
  }

  template <typename T>
  void store(const core::Band& band, T* destination) {
    for_lines(band, [&](const Line& line) HWY_ATTR {
      T* to = destination + line.first;
      if (shape_.inner == 1) {
        const int strips = line.count / shape_.block, rest = line.count % shape_.block;
        transpose(x_[0] + line.strip, kStripRoom, shape_.block, strips, line_, shape_.block);
        for (int j = 0; j < rest; ++j)
          line_[strips * shape_.block + j] = x_[j][line.strip + strips];
        store_run(line_, line.count, to);
      } else {
        for (int j = 0; j < line.width; ++j)
          store_run(x_[j] + line.strip, line.count, to + j * shape_.inner);
      }
    });
  }

 private:
  // Strips from number `strip` on that lie together. With one channel: `count` elements, cut into
  // strips. Else `count` channels, one strip each, of `width` elements.
  struct Line {
    std::int64_t first;
    int strip, count, width;
  };

  template <typename Visit>
  HWY_INLINE void for_lines(const core::Band& band, const Visit& visit) {
    for (int g = 0; g < band.rows; ++g) {
      const core::BlockRow row = core::block_row(shape_, band.first_row + g);
      if (joined_) {
        visit({row.first, g * shape_.rows * shape_.run, row.height * static_cast<int>(shape_.width),
               0});
        continue;
      }
      for (int d = 0; d < row.depth; ++d) {
        for (int h = 0; h < row.height; ++h)
          for_runs(band, row.first + (d * shape_.height + h) * shape_.width * shape_.inner,
                   (g * shape_.rows + d * shape_.tall + h) * shape_.run, visit);
      }
    }
  }

  // The same for the blocks of a band in one row of the tensor.
  template <typename Visit>
  HWY_INLINE void for_runs(const core::Band& band, std::int64_t row, int strip,
                           const Visit& visit) {
    if (shape_.inner == 1) {
      const std::int64_t at = band.first_column * shape_.block;
      const std::int64_t most = std::int64_t{band.columns} * shape_.block;
      visit({row + at, strip, static_cast<int>(std::min(most, shape_.width - at)), 0});
      return;
    }
    for (int k = 0; k < band.columns;) {
      const std::int64_t index = band.first_column + k;
      const core::Column own = core::column(shape_, index);
      const int channels = static_cast<int>(
          std::min<std::int64_t>(band.columns - k, shape_.inner - index % shape_.inner));
      visit({row + own.first, strip + k, channels, own.width});
      k += channels;
    }
  }

  void mark(int strip, int strips, int elements) {
    std::memset(elements_ + strip, elements, static_cast<std::size_t>(strips));
  }
  void clear() {
    for (int j = 0; j < shape_.room; ++j)
      std::memset(x_[j], 0, static_cast<std::size_t>(shape_.slots) * sizeof(float));
    std::memset(elements_, 0, static_cast<std::size_t>(shape_.slots));
  }

  const core::PoolShape& shape_;
  bool joined_;  // the strips of a block row are neighbours in memory
  bool whole_;   // every band has all of its strips, and those all of their elements
  std::uint8_t elements_[kStripRoom] = {};  // of each strip
  HWY_ALIGN float x_[core::kMaxStrip][kStripRoom] = {};
  HWY_ALIGN float line_[core::kMaxStrips * core::kMaxStrip];
};

}  // namespace HWY_NAMESPACE
}  // namespace backfold::cpu
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET

#endif  // BACKFOLD_POOL_SIMD_BAND_INL_H_
