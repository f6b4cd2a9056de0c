// SPDX-License-Identifier: Apache-2.0
//
// Values of groups that are columns of a strided tensor, for the SIMD target being compiled. A lane
// is a column, as in columns-inl.h: words of codes are transposed, values are written row by row.

#if defined(BACKFOLD_GROUP_SIMD_PLACE_COLUMNS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BACKFOLD_GROUP_SIMD_PLACE_COLUMNS_INL_H_
#undef BACKFOLD_GROUP_SIMD_PLACE_COLUMNS_INL_H_
#else
#define BACKFOLD_GROUP_SIMD_PLACE_COLUMNS_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <type_traits>

#include "base/simd/transpose-inl.h"
#include "base/widths.h"
#include "group/geometry.h"
#include "group/simd/columns-inl.h"
#include "group/simd/place-inl.h"
#include "group/simd/planes-inl.h"

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
HWY_BEFORE_NAMESPACE();
namespace backfold::cpu {
namespace HWY_NAMESPACE {

// Columns of a cache line.
template <typename T>
constexpr int kLineColumns = sizeof(T) == 2 ? 32 : 16;

// Columns that are restored together, so that what is written to a row is longer than a line.
constexpr int kSpanColumns = 64;

// Each column's own grid. The codes of a constant one are not codes: `fixed` has a bit for it where
// they must not matter, and then `positive` has one if its value is.
struct ColumnGrids {
  HWY_ALIGN float base[kSpanColumns];
  HWY_ALIGN float step[kSpanColumns];
  std::uint64_t fixed;
  std::uint64_t positive;
};

// 16-bit elements are restored as pairs of columns, the even ones of all columns coming first.
template <typename T>
constexpr bool kColumnPairs = sizeof(T) == 2;

template <typename T>
int column_place(int column, int columns) {
  return kColumnPairs<T> ? column % 2 * (columns / 2) + column / 2 : column;
}

// Piece `index` of each word, whatever stands above it.
template <int kWidth>
HWY_INLINE VU piece_at(const std::uint32_t* words, int index) {
  const VU word = hn::Load(DU(), words);
  if constexpr (kWidth == 8) return word;
  return hn::ShiftRightSame(word, 4 * kWidth * index);
}

// Calls put(k, codes) with the codes of a vector of columns at a position of quarter k. Words that
// follow each other in a column are `columns` apart.
template <int kBits, typename Put>
HWY_INLINE void column_codes(const std::uint32_t* words, int columns, int position,
                             const Put& put) {
  const DU du;
  if constexpr (kBits == 16) {
    const VU mask = hn::Set(du, 0xffffu);
    const VU low = hn::Load(du, words + 2 * position * columns);
    const VU high = hn::Load(du, words + (2 * position + 1) * columns);
    put(0, hn::And(low, mask));
    put(1, hn::ShiftRight<16>(low));
    put(2, hn::And(high, mask));
    put(3, hn::ShiftRight<16>(high));
  } else {
    constexpr core::Planes kPlanes = core::planes_of(kBits);
    const auto piece = [&]<int kWidth>(std::integral_constant<int, kWidth>, int first) HWY_ATTR {
      constexpr int kPieces = 8 / kWidth;
      return piece_at<kWidth>(words + (first + position / kPieces) * columns, position % kPieces);
    };
    const VU low = piece(std::integral_constant<int, kPlanes.low>(), 0);
    VU high = low;
    if constexpr (kPlanes.high != 0)
      high = piece(std::integral_constant<int, kPlanes.high>(), kTileRows / 32 * kPlanes.low);
    split_pieces<kBits>(du, low, high, put);
  }
}

// Restores `columns` columns of kTileRows rows, `stride` apart, from their words of codes.
template <int kBits, bool kZeroExact, bool kStream, typename T>
void place_columns(const std::uint32_t* words, const ColumnGrids& grids, int columns,
                   float smallest, T* destination, std::int64_t stride) {
  const DF d;
  constexpr int kLanes = hn::MaxLanes(DF());
  constexpr int kQuarter = kTileRows / 4;
  const int half = columns / 2;
  for (int position = 0; position < kQuarter; ++position) {
    T* const row = destination + position * stride;
    const auto restore = [&](int column, const auto& put) HWY_ATTR {
      const VF bases = hn::Load(d, grids.base + column), steps = hn::Load(d, grids.step + column);
      column_codes<kBits>(words + column, columns, position, [&](int k, VU code) HWY_ATTR {
        put(k * kQuarter * stride, k, value_at<kZeroExact>(code, steps, bases, smallest));
      });
    };
    if constexpr (kColumnPairs<T>) {
      for (int column = 0; column < half; column += kLanes) {
        VF even[4];
        restore(column, [&](std::int64_t, int k, VF v) HWY_ATTR { even[k] = v; });
        restore(half + column, [&](std::int64_t offset, int k, VF v) HWY_ATTR {
          const hn::Repartition<std::uint16_t, DF> d16;
          put_vector<kStream>(interleaved_elements(even[k], v, destination), d16,
                              reinterpret_cast<std::uint16_t*>(row + offset + 2 * column));
        });
      }
    } else {
      for (int column = 0; column < columns; column += kLanes)
        restore(column, [&](std::int64_t offset, int, VF v)
                            HWY_ATTR { store_elements<kStream>(d, v, row + offset + column); });
    }
  }
}

// Restores up to kSpanColumns columns whose codes follow each other into whole tiles of `width`
// columns, which are whole lines.
template <typename T>
void place_columns(const GroupFormat& format, const std::uint8_t* codes, int columns, int width,
                   const ColumnGrids& grids, float smallest, bool stream, T* destination,
                   std::int64_t stride) {
  const int count = kTileRows * format.bits / 32;
  HWY_ALIGN std::uint32_t words[kTileRows / 2 * kSpanColumns];
  if (columns < width) std::fill_n(words, count * width, 0u);
  const auto* const from = reinterpret_cast<const float*>(codes);
  auto* const to = reinterpret_cast<float*>(words);
  if (kColumnPairs<T>) {
    transpose(from, 2 * count, columns / 2, count, to, width);
    transpose(from + count, 2 * count, columns / 2, count, to + width / 2, width);
  } else {
    transpose(from, count, columns, count, to, width);
  }
  for (std::uint64_t rest = grids.fixed; rest != 0; rest &= rest - 1) {
    const int column = std::countr_zero(rest);
    const std::uint32_t word = (grids.positive >> column & 1u) != 0 ? ~0u : 0u;
    for (int i = 0; i < count; ++i) words[i * width + column_place<T>(column, width)] = word;
  }
  core::with_width<kCodeWidths>(format.bits, [&]<int kBits>() HWY_ATTR {
    if constexpr (kBits < 8 * sizeof(T)) {
      if (format.zero_exact && stream)
        place_columns<kBits, true, true>(words, grids, width, smallest, destination, stride);
      else if (format.zero_exact)
        place_columns<kBits, true, false>(words, grids, width, smallest, destination, stride);
      else if (stream)
        place_columns<kBits, false, true>(words, grids, width, smallest, destination, stride);
      else
        place_columns<kBits, false, false>(words, grids, width, smallest, destination, stride);
    }
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace backfold::cpu
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET

#endif  // BACKFOLD_GROUP_SIMD_PLACE_COLUMNS_INL_H_
