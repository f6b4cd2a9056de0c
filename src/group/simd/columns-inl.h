// SPDX-License-Identifier: Apache-2.0
//
// Groups that are columns of a tile of a strided tensor, for the SIMD target being compiled. A lane
// is a column, so that rows are read as they lie in memory; codes change places only when they fill
// words.

#if defined(BACKFOLD_GROUP_SIMD_COLUMNS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BACKFOLD_GROUP_SIMD_COLUMNS_INL_H_
#undef BACKFOLD_GROUP_SIMD_COLUMNS_INL_H_
#else
#define BACKFOLD_GROUP_SIMD_COLUMNS_INL_H_
#endif

#include <hwy/highway.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "base/arithmetic.h"
#include "base/rng.h"
#include "base/simd/random-inl.h"
#include "base/simd/transpose-inl.h"
#include "base/widths.h"
#include "group/geometry.h"
#include "group/simd/draw-inl.h"
#include "group/simd/planes-inl.h"
#include "group/simd/range-inl.h"

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
HWY_BEFORE_NAMESPACE();
namespace backfold::cpu {
namespace HWY_NAMESPACE {

// Columns of a tile: a cache line of fp32.
constexpr int kTileColumns = kBatch;
constexpr int kTileRows = 128;

// The values of a tile, row by row.
struct Tile {
  HWY_ALIGN float rows[kTileRows][kTileColumns];
};

// Reads `count` rows of kVectors vectors into a tile, from column `first` on; load(row, column)
// gives a vector. Finds the extremes of the columns as find_extremes() does, and returns a bit for
// each column whose elements are finite.
template <bool kPositiveOnly, int kVectors, typename Load>
HWY_INLINE std::uint32_t read_columns(const Load& load, int first, int count, Tile& tile,
                                      RangeBatch& ranges) {
  const DF d;
  constexpr int kLanes = hn::MaxLanes(DF());
  const VF zero = hn::Zero(d), infinity = hn::Set(d, INFINITY);
  VF low[kVectors], high[kVectors], marker[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    low[v] = infinity;
    high[v] = hn::Neg(infinity);
    marker[v] = zero;
  }
  for (int row = 0; row < count; ++row) {
    for (int v = 0; v < kVectors; ++v) {
      const int column = first + v * kLanes;
      const VF x = load(row, column);
      hn::Store(x, d, tile.rows[row] + column);
      high[v] = hn::Max(high[v], x);
      low[v] = hn::Min(low[v], kPositiveOnly ? hn::IfThenElse(hn::Gt(x, zero), x, infinity) : x);
      // Not finite from the first such element on: infinity times zero is NaN.
      marker[v] = hn::MulAdd(x, zero, marker[v]);
    }
  }
  std::uint32_t finite = 0;
  for (int v = 0; v < kVectors; ++v) {
    const int column = first + v * kLanes;
    if constexpr (kPositiveOnly) count_positive(low[v], high[v]);
    hn::Store(low[v], d, ranges.low + column);
    hn::Store(high[v], d, ranges.high + column);
    finite |= bits_of_mask(d, hn::Eq(marker[v], zero)) << column;
  }
  return finite;
}

// Columns of a tile whose values are all the same, bit by bit.
inline std::uint32_t same_columns(const Tile& tile, int count) {
  const DU du;
  std::uint32_t same = 0;
  for (int column = 0; column < kTileColumns; column += static_cast<int>(hn::Lanes(du))) {
    const auto bits_at = [&](int row) HWY_ATTR {
      return hn::BitCast(du, hn::Load(DF(), tile.rows[row] + column));
    };
    const VU first = bits_at(0);
    VU different = hn::Zero(du);
    for (int row = 1; row < count; ++row)
      different = hn::Or(different, hn::Xor(first, bits_at(row)));
    same |= bits_of_mask(du, hn::Eq(different, hn::Zero(du))) << column;
  }
  return same;
}

// What the codes of a tile are drawn with.
struct ColumnDraw {
  const Tile* tile;
  int count;    // rows; the codes of missing ones are 0
  int columns;  // that are stored
  const RangeBatch* ranges;
  const std::uint32_t* first_blocks;  // of each column, with the key's offset added
  std::uint8_t* codes;
  std::uint32_t second;  // of the key
  float ceiling;
};

// kPieces neighbours of a lane, 4 * kWidth bits each, as one word.
template <int kWidth, int kPieces>
HWY_INLINE VU join_all(const VU* pieces) {
  if constexpr (kPieces == 1) {
    return pieces[0];
  } else {
    return join_pieces<kWidth * kPieces / 2>(join_all<kWidth, kPieces / 2>(pieces),
                                             join_all<kWidth, kPieces / 2>(pieces + kPieces / 2));
  }
}

// Eight pieces of each lane as words of a plane. Vectors of words are kTileColumns apart.
template <int kWidth>
HWY_INLINE void store_words(const VU (&pieces)[8], std::uint32_t* words) {
  constexpr int kPieces = 8 / kWidth;
  for (int word = 0; word < kWidth; ++word)
    hn::Store(join_all<kWidth, kPieces>(pieces + word * kPieces), DU(),
              words + word * kTileColumns);
}

template <int kBits>
HWY_INLINE void store_column_codes(const FourCodes (&codes)[8], int step, std::uint32_t* words) {
  constexpr core::Planes kPlanes = core::planes_of(kBits);
  constexpr bool kBytes = kBits > 2 && kBits != 4;
  VU pieces[8];
  if constexpr (kBits == 16) {
    for (int i = 0; i < 8; ++i) {
      hn::Store(codes[i].low, DU(), words + (16 * step + 2 * i) * kTileColumns);
      hn::Store(codes[i].high, DU(), words + (16 * step + 2 * i + 1) * kTileColumns);
    }
  } else {
    for (int i = 0; i < 8; ++i)
      pieces[i] = kBytes ? narrow_bytes<kPlanes.low>(codes[i].low) : codes[i].low;
    store_words<kPlanes.low>(pieces, words + step * kPlanes.low * kTileColumns);
  }
  if constexpr (kPlanes.high != 0) {
    for (int i = 0; i < 8; ++i)
      pieces[i] = narrow_bytes<kPlanes.high>(hn::ShiftRight<kPlanes.low>(codes[i].low));
    store_words<kPlanes.high>(
        pieces, words + (kTileRows / 32 * kPlanes.low + step * kPlanes.high) * kTileColumns);
  }
}

template <int kBits, bool kZeroExact, bool kShort>
void draw_columns(const ColumnDraw& draw) {
  const DF d;
  const DU du;
  constexpr int kLanes = hn::MaxLanes(DF());
  constexpr int kQuarter = kTileRows / 4;
  constexpr int kWords = kTileRows * kBits / 32;
  HWY_ALIGN std::uint32_t words[kWords][kTileColumns];
  const VF ceiling = hn::Set(d, draw.ceiling);
  for (int column = 0; column < draw.columns; column += kLanes) {
    const VF minus_base = hn::Neg(hn::Load(d, draw.ranges->base + column));
    const VF inverse = hn::Load(d, draw.ranges->inverse + column);
    const VU first_block = hn::Load(du, draw.first_blocks + column);
    for (int step = 0; step < kQuarter / 8; ++step) {
      FourCodes codes[8];
      for (int pair = 0; pair < 4; ++pair) {
        const auto block = static_cast<std::uint32_t>(4 * step + pair);
        const VU hash = block_hash(hn::Add(first_block, hn::Set(du, block)), draw.second);
        const auto codes_of = [&](auto number) HWY_ATTR {
          constexpr int kSide = number;
          const int position = 8 * step + 2 * pair + kSide;
          return four_codes<kBits, kZeroExact>([&](auto k) HWY_ATTR {
            const int row = k * kQuarter + position;
            // As draw_code() gives it.
            if (kShort && row >= draw.count) return hn::Set(d, kZeroExact ? 0.0f : 1.0f);
            const VU multiplier = hn::Set(du, core::element_multiplier(4 * kSide + k));
            return draw_code<kZeroExact, true>(hn::Load(d, draw.tile->rows[row] + column),
                                               minus_base, inverse,
                                               unit_interval(hn::Mul(hash, multiplier)), ceiling);
          });
        };
        codes[2 * pair] = codes_of(std::integral_constant<int, 0>());
        codes[2 * pair + 1] = codes_of(std::integral_constant<int, 1>());
      }
      store_column_codes<kBits>(codes, step, words[0] + column);
    }
  }
  transpose(reinterpret_cast<const float*>(words), kTileColumns, kWords, draw.columns,
            reinterpret_cast<float*>(draw.codes), kWords);
}

inline void draw_columns(const GroupFormat& format, const ColumnDraw& draw) {
  core::with_width<kCodeWidths>(format.bits, [&]<int kBits>() HWY_ATTR {
    const bool short_tile = draw.count < kTileRows;
    if (format.zero_exact) {
      short_tile ? draw_columns<kBits, true, true>(draw) : draw_columns<kBits, true, false>(draw);
    } else {
      short_tile ? draw_columns<kBits, false, true>(draw) : draw_columns<kBits, false, false>(draw);
    }
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace backfold::cpu
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET

#endif  // BACKFOLD_GROUP_SIMD_COLUMNS_INL_H_
