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

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <algorithm>
#include <bitset>
#include <cstdint>

#include "base/simd/transpose-inl.h"
#include "base/widths.h"
#include "group/geometry.h"
#include "group/simd/columns-inl.h"
#include "group/simd/place-inl.h"

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
HWY_BEFORE_NAMESPACE();
namespace backfold::cpu {
namespace HWY_NAMESPACE {

// Columns of a cache line.
template <typename T>
constexpr int kLineColumns = sizeof(T) == 2 ? 32 : 16;

// Columns that are restored together, so that a row is written several lines at a time. Twice as
// many make bf16 slower again.
constexpr int kSpanColumns = 128;
using ColumnSet = std::bitset<kSpanColumns>;

// Each column's own grid. The codes of constant columns are not codes: those where that would
// matter are `fixed`, and of these some are `positive`.
struct ColumnGrids {
  HWY_ALIGN float base[kSpanColumns];
  HWY_ALIGN float step[kSpanColumns];
  ColumnSet fixed;
  ColumnSet positive;
};

// 16-bit elements are restored as pairs of columns, the even ones of all columns coming first.
template <typename T>
constexpr bool kColumnPairs = sizeof(T) == 2;

template <typename T>
int column_place(int column, int columns) {
  return kColumnPairs<T> ? column % 2 * (columns / 2) + column / 2 : column;
}

// What a plane of kWidth bits has at a position of a vector of columns. Words that follow each
// other in a column are `columns` apart.
template <int kWidth>
HWY_INLINE VU plane_at(const std::uint32_t* words, int columns, int position) {
  const DU du;
  const int bit = kWidth * position;
  const VU word = hn::Load(du, words + bit / 32 * columns);
  return hn::And(hn::ShiftRightSame(word, bit % 32), hn::Set(du, (1u << kWidth) - 1u));
}

template <int kBits>
HWY_INLINE VU codes_at(const std::uint32_t* words, int columns, int position) {
  constexpr core::Planes kPlanes = core::planes_of(kBits);
  const VU low = plane_at<kPlanes.low>(words, columns, position);
  if constexpr (kPlanes.high == 0) {
    return low;
  } else {
    const std::uint32_t* const plane = words + kTileRows / 32 * kPlanes.low * columns;
    return hn::Or(low,
                  hn::ShiftLeft<kPlanes.low>(plane_at<kPlanes.high>(plane, columns, position)));
  }
}

// Restores `columns` columns of kTileRows rows, `stride` apart, from their words of codes. Each row
// is written at a stretch: with one of every quarter in turn, rows of 4 KiB pushed each other out
// of the first-level cache. While a large tensor's are written, the codes that follow are fetched:
// each span has pages of its own, which the hardware does not foresee.
template <int kBits, bool kZeroExact, bool kStream, typename T>
void place_columns(const std::uint32_t* words, const ColumnGrids& grids, int columns,
                   float smallest, T* destination, std::int64_t stride, const std::uint8_t* ahead) {
  const DF d;
  constexpr int kLanes = hn::MaxLanes(DF());
  const int half = columns / 2;
  for (int row = 0; row < kTileRows; ++row) {
    T* const to = destination + row * stride;
    const int position = core::position_of(row, kTileRows);
    if constexpr (kStream) hwy::Prefetch(ahead + row * (columns * kBits / 8));
    const auto values_at = [&](int column) HWY_ATTR {
      const VF bases = hn::Load(d, grids.base + column), steps = hn::Load(d, grids.step + column);
      return value_at<kZeroExact>(codes_at<kBits>(words + column, columns, position), steps, bases,
                                  smallest);
    };
    if constexpr (kColumnPairs<T>) {
      for (int column = 0; column < half; column += kLanes) {
        const hn::Repartition<std::uint16_t, DF> d16;
        const auto elements = interleaved_elements(values_at(column), values_at(half + column), to);
        put_vector<kStream>(elements, d16, reinterpret_cast<std::uint16_t*>(to + 2 * column));
      }
    } else {
      for (int column = 0; column < columns; column += kLanes)
        store_elements<kStream>(d, values_at(column), to + column);
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
  const std::uint8_t* const ahead = codes + static_cast<std::size_t>(columns * count) * 4;
  const auto* const from = reinterpret_cast<const float*>(codes);
  auto* const to = reinterpret_cast<float*>(words);
  if (kColumnPairs<T>) {
    transpose(from, 2 * count, columns / 2, count, to, width);
    transpose(from + count, 2 * count, columns / 2, count, to + width / 2, width);
  } else {
    transpose(from, count, columns, count, to, width);
  }
  for (int column = 0; grids.fixed.any() && column < columns; ++column) {
    if (!grids.fixed[column]) continue;
    const std::uint32_t word = grids.positive[column] ? ~0u : 0u;
    for (int i = 0; i < count; ++i) words[i * width + column_place<T>(column, width)] = word;
  }
  core::with_width<kCodeWidths>(format.bits, [&]<int kBits>() HWY_ATTR {
    if constexpr (kBits < 8 * sizeof(T)) {
      if (format.zero_exact && stream)
        place_columns<kBits, true, true>(words, grids, width, smallest, destination, stride, ahead);
      else if (format.zero_exact)
        place_columns<kBits, true, false>(words, grids, width, smallest, destination, stride,
                                          ahead);
      else if (stream)
        place_columns<kBits, false, true>(words, grids, width, smallest, destination, stride,
                                          ahead);
      else
        place_columns<kBits, false, false>(words, grids, width, smallest, destination, stride,
                                           ahead);
    }
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace backfold::cpu
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET

#endif  // BACKFOLD_GROUP_SIMD_PLACE_COLUMNS_INL_H_
