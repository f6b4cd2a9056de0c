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
#include <cstdint>

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

// Columns that are restored together: whole cache lines.
template <typename T>
constexpr int kLineColumns = sizeof(T) == 2 ? 32 : 16;

struct ColumnGrids {
  HWY_ALIGN float base[kLineColumns<core::Half>];
  HWY_ALIGN float step[kLineColumns<core::Half>];
};

// The next piece of each lane's word, which moves on to the one that follows.
template <int kWidth>
HWY_INLINE VU take_piece(std::uint32_t* word) {
  const DU du;
  const VU pieces = hn::Load(du, word);
  if constexpr (kWidth < 8) hn::Store(hn::ShiftRight<4 * kWidth>(pieces), du, word);
  return pieces;
}

// Restores kLineColumns<T> columns of kTileRows rows, `stride` apart, from their words of codes,
// which it uses up.
template <int kBits, bool kZeroExact, bool kStream, typename T>
void place_columns(std::uint32_t* words, const ColumnGrids& grids, float smallest, T* destination,
                   std::int64_t stride) {
  const DF d;
  const DU du;
  constexpr int kLanes = hn::MaxLanes(DF());
  constexpr int kQuarter = kTileRows / 4;
  constexpr int kColumns = kLineColumns<T>;
  for (int position = 0; position < kQuarter; ++position) {
    for (int column = 0; column < kColumns; column += kLanes) {
      const VF bases = hn::Load(d, grids.base + column), steps = hn::Load(d, grids.step + column);
      T* const first = destination + position * stride + column;
      const auto put = [&](int k, VU code) HWY_ATTR {
        store_elements<kStream>(d, value_at<kZeroExact>(code, steps, bases, smallest),
                                first + k * kQuarter * stride);
      };
      if constexpr (kBits == 16) {
        const VU mask = hn::Set(du, 0xffffu);
        const VU low = hn::Load(du, words + 2 * position * kColumns + column);
        const VU high = hn::Load(du, words + (2 * position + 1) * kColumns + column);
        put(0, hn::And(low, mask));
        put(1, hn::ShiftRight<16>(low));
        put(2, hn::And(high, mask));
        put(3, hn::ShiftRight<16>(high));
      } else {
        constexpr core::Planes kPlanes = core::planes_of(kBits);
        const VU low =
            take_piece<kPlanes.low>(words + position * kPlanes.low / 8 * kColumns + column);
        VU high = low;
        if constexpr (kPlanes.high != 0) {
          constexpr int kFirst = kTileRows / 32 * kPlanes.low;
          high = take_piece<kPlanes.high>(
              words + (kFirst + position * kPlanes.high / 8) * kColumns + column);
        }
        split_pieces<kBits>(du, low, high, put);
      }
    }
  }
}

// Restores up to kLineColumns<T> columns whose codes follow each other into whole tiles.
template <typename T>
void place_columns(const GroupFormat& format, const std::uint8_t* codes, int columns,
                   const ColumnGrids& grids, float smallest, bool stream, T* destination,
                   std::int64_t stride) {
  const int count = kTileRows * format.bits / 32;
  HWY_ALIGN std::uint32_t words[kTileRows / 2 * kLineColumns<T>];
  if (columns < kLineColumns<T>) std::fill_n(words, count * kLineColumns<T>, 0u);
  transpose(reinterpret_cast<const float*>(codes), count, columns, count,
            reinterpret_cast<float*>(words), kLineColumns<T>);
  core::with_width<kCodeWidths>(format.bits, [&]<int kBits>() HWY_ATTR {
    if constexpr (kBits < 8 * sizeof(T)) {
      if (format.zero_exact)
        place_columns<kBits, true, false>(words, grids, smallest, destination, stride);
      else if (stream)
        place_columns<kBits, false, true>(words, grids, smallest, destination, stride);
      else
        place_columns<kBits, false, false>(words, grids, smallest, destination, stride);
    }
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace backfold::cpu
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET

#endif  // BACKFOLD_GROUP_SIMD_PLACE_COLUMNS_INL_H_
