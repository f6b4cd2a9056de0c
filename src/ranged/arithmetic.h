// SPDX-License-Identifier: Apache-2.0
//
// Every floating-point operation of the ranged quantizer, for the reference, the SIMD kernels and
// the CUDA kernels. ranged.h defines the bytes; arithmetic.h has what it shares with the group
// quantizer.

#ifndef BACKFOLD_RANGED_ARITHMETIC_H_
#define BACKFOLD_RANGED_ARITHMETIC_H_

#include <array>
#include <cstdint>

#include "backfold/ranged.h"
#include "base/arithmetic.h"
#include "base/bits.h"
#include "base/checks.h"
#include "base/codes.h"
#include "base/rng.h"

namespace backfold::core {

inline constexpr std::array<int, 3> kRangedWidths = {2, 4, 8};

struct RangedGeometry {
  explicit RangedGeometry(const RangedFormat& format)
      : count(format.outer * format.channels * format.inner),
        header_bytes(padded(static_cast<std::size_t>(format.channels) * sizeof(Grid))),
        code_bytes(plane_bytes(format.bits, count)) {}

  std::size_t bytes() const { return header_bytes + code_bytes; }

  std::int64_t count;
  std::size_t header_bytes;
  std::size_t code_bytes;
};

BACKFOLD_HD Levels ranged_levels(int bits) { return levels_for(bits, false, false); }

// A channel's header.
BACKFOLD_HD Grid ranged_grid(float low, float high, const Levels& levels) {
  if (!(low <= high) || !is_finite(low) || !is_finite(high)) return {0.0f, float_of(0x7fc0'0000u)};
  low = low < -kHuge ? -kHuge : low > kHuge ? kHuge : low;
  high = high < -kHuge ? -kHuge : high > kHuge ? kHuge : high;
  float range = high - low;
  if (range > 0.0f && range < kTiny) range = kTiny;
  return {low, range * levels.inverse_count};
}

// What a channel's elements are multiplied with. Of a step of 0 or NaN it is 0: then finite
// elements have the code 0.
BACKFOLD_HD float inverse_of(float step) { return step > 0.0f ? reciprocal(step) : 0.0f; }

// The code of an element. NaN and what is below the range have the code 0.
BACKFOLD_HD std::uint32_t ranged_draw(float value, const Grid& grid, float inverse, float uniform,
                                      const Levels& levels) {
  return draw(value > grid.base ? value : grid.base, grid.base, inverse, uniform, levels);
}

// The random number of element i of a tensor, in [1, 2).
BACKFOLD_HD float uniform_of(MixedKey key, std::int64_t i) {
  const std::uint64_t block = static_cast<std::uint64_t>(i) / kRandomBlock;
  const std::uint32_t hash =
      block_hash(block_offset(key, block), key.second, static_cast<std::uint32_t>(block));
  return unit_interval(hash * element_multiplier(static_cast<int>(i % kRandomBlock)));
}

// Keeps every value below what bf16 rounds to infinity, and above the range of pack()'s headers.
inline constexpr float kDecodable = 0x1.cp127f;

// Whether a channel of this header decodes to numbers; else all of it is NaN.
BACKFOLD_HD bool decodes(const Grid& grid, const Levels& levels) {
  const float base = grid.base < 0.0f ? -grid.base : grid.base;
  const float step = grid.step < 0.0f ? -grid.step : grid.step;
  return base + levels.count * step <= kDecodable;
}

// Bounds are compared as integers that order like them (bits.h): -0 is below +0, so the result does
// not depend on the order of the elements.
BACKFOLD_HD bool is_below(float a, float b) {
  return static_cast<std::int32_t>(order_key(bits_of(a))) <
         static_cast<std::int32_t>(order_key(bits_of(b)));
}

// A channel's bounds.
struct Bounds {
  float low;
  float high;
};

// A range without the bounds that are NaN.
BACKFOLD_HD Bounds bounds_of(float low, float high) {
  return {low != low ? float_of(0x7f80'0000u) : low, high != high ? float_of(0xff80'0000u) : high};
}

BACKFOLD_HD Bounds joined(const Bounds& a, const Bounds& b) {
  return {is_below(b.low, a.low) ? b.low : a.low, is_below(a.high, b.high) ? b.high : a.high};
}

}  // namespace backfold::core

#endif  // BACKFOLD_RANGED_ARITHMETIC_H_
