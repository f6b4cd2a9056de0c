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

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <cmath>
#include <cstddef>
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

// Tensors at least this large lie in memory rather than in caches.
constexpr std::int64_t kLargeBytes = std::int64_t{4} << 20;

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

// Of a row, fetched at a time: pages and memory are opened once for several tiles.
constexpr int kAheadBytes = 256;

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
  const std::byte* ahead;  // kAheadBytes each of later rows; null if not worth a prefetch
  int ahead_rows;
  std::ptrdiff_t row_bytes;
};

// kPieces neighbours of a lane, 4 * kWidth bits each, as one word. Vectors are kLanes apart.
template <int kWidth, int kPieces>
HWY_INLINE VU join_all(const std::uint32_t* pieces) {
  constexpr int kLanes = hn::MaxLanes(DU());
  if constexpr (kPieces == 1) {
    return hn::Load(DU(), pieces);
  } else {
    constexpr int kHalf = kPieces / 2;
    return join_pieces<kWidth * kHalf>(join_all<kWidth, kHalf>(pieces),
                                       join_all<kWidth, kHalf>(pieces + kHalf * kLanes));
  }
}

// The pieces of a quarter as words of a plane, which are kTileColumns apart.
template <int kWidth>
HWY_INLINE void store_words(const std::uint32_t* pieces, std::uint32_t* words) {
  constexpr int kLanes = hn::MaxLanes(DU());
  constexpr int kPieces = 8 / kWidth;
  for (int word = 0; word < kTileRows / 4 / kPieces; ++word)
    hn::Store(join_all<kWidth, kPieces>(pieces + word * kPieces * kLanes), DU(),
              words + word * kTileColumns);
}

template <int kBits, bool kZeroExact, bool kClamp, bool kShort>
void draw_columns(const ColumnDraw& draw) {
  const DF d;
  const DU du;
  constexpr int kLanes = hn::MaxLanes(DF());
  constexpr int kQuarter = kTileRows / 4;
  constexpr int kHashes = kTileRows / core::kRandomBlock;
  constexpr int kWords = kTileRows * kBits / 32;
  constexpr core::Planes kPlanes = core::planes_of(kBits);
  HWY_ALIGN std::uint32_t hashes[kHashes][kLanes];
  HWY_ALIGN std::uint32_t low[kQuarter][kLanes];
  HWY_ALIGN std::uint32_t high[kQuarter][kLanes];
  HWY_ALIGN std::uint32_t words[kWords][kTileColumns];
  const VF ceiling = hn::Set(d, draw.ceiling);
  for (int column = 0; column < draw.columns; column += kLanes) {
    const VU first_block = hn::Load(du, draw.first_blocks + column);
    for (int i = 0; i < kHashes; ++i) {
      const VU block = hn::Add(first_block, hn::Set(du, static_cast<std::uint32_t>(i)));
      hn::Store(block_hash(block, draw.second), du, hashes[i]);
    }
    const VF minus_base = hn::Neg(hn::Load(d, draw.ranges->base + column));
    const VF inverse = hn::Load(d, draw.ranges->inverse + column);
    for (int pair = 0; pair < kHashes; ++pair) {
      // Later tiles, a part at a time: rows are too far apart for the hardware to foresee them. To
      // the second-level cache: 128 of them 4 KiB apart share one set of the first.
      if (!kShort && column == 0 && draw.ahead != nullptr) {
        const int rows = draw.ahead_rows / kHashes;
        for (int row = pair * rows; row < (pair + 1) * rows; ++row)
          for (int byte = 0; byte < kAheadBytes; byte += 64)
            __builtin_prefetch(draw.ahead + row * draw.row_bytes + byte, 0, 2);
      }
      const VU hash = hn::Load(du, hashes[pair]);
      const auto draw_side = [&](auto side) HWY_ATTR {
        const int position = 2 * pair + side;
        const FourCodes codes = four_codes<kBits, kZeroExact>([&](auto k) HWY_ATTR {
          const int row = k * kQuarter + position;
          // As draw_code() gives it.
          if (kShort && row >= draw.count) return hn::Set(d, kZeroExact ? 0.0f : 1.0f);
          const VU multiplier = hn::Set(du, core::element_multiplier(4 * side + k));
          return draw_code<kZeroExact, kClamp>(hn::Load(d, draw.tile->rows[row] + column),
                                               minus_base, inverse,
                                               unit_interval(hn::Mul(hash, multiplier)), ceiling);
        });
        if constexpr (kBits == 16) {
          hn::Store(codes.low, du, words[2 * position] + column);
          hn::Store(codes.high, du, words[2 * position + 1] + column);
        } else if constexpr (kBits <= 2 || kBits == 4) {
          hn::Store(codes.low, du, low[position]);
        } else {
          hn::Store(narrow_bytes<kPlanes.low>(codes.low), du, low[position]);
          if constexpr (kPlanes.high != 0)
            hn::Store(narrow_bytes<kPlanes.high>(hn::ShiftRight<kPlanes.low>(codes.low)), du,
                      high[position]);
        }
      };
      draw_side(std::integral_constant<int, 0>());
      draw_side(std::integral_constant<int, 1>());
    }
    if constexpr (kBits < 16) store_words<kPlanes.low>(low[0], words[0] + column);
    if constexpr (kPlanes.high != 0)
      store_words<kPlanes.high>(high[0], words[kTileRows / 32 * kPlanes.low] + column);
  }
  transpose(reinterpret_cast<const float*>(words), kTileColumns, kWords, draw.columns,
            reinterpret_cast<float*>(draw.codes), kWords);
}

template <int kBits, bool kZeroExact>
void draw_columns_of(bool clamp, const ColumnDraw& draw) {
  if (draw.count < kTileRows) return draw_columns<kBits, kZeroExact, true, true>(draw);
  clamp ? draw_columns<kBits, kZeroExact, true, false>(draw)
        : draw_columns<kBits, kZeroExact, false, false>(draw);
}

inline void draw_columns(const GroupFormat& format, bool clamp, const ColumnDraw& draw) {
  core::with_width<kCodeWidths>(format.bits, [&]<int kBits>() HWY_ATTR {
    format.zero_exact ? draw_columns_of<kBits, true>(clamp, draw)
                      : draw_columns_of<kBits, false>(clamp, draw);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace backfold::cpu
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET

#endif  // BACKFOLD_GROUP_SIMD_COLUMNS_INL_H_
