// SPDX-License-Identifier: Apache-2.0
//
// The arithmetic of the group quantizer, which the ranged quantizer and pooling use in part.
// group.h defines the bytes; this file says how the numbers in them are rounded. The reference and
// the CUDA kernels call these functions; the SIMD kernels repeat some of them on vectors, operation
// by operation, from the same constants.
//
// Order and rounding are part of the format. A product and a sum round separately unless written as
// fused(); divisions and reciprocals round to nearest; nothing is reassociated.

#ifndef BACKFOLD_BASE_ARITHMETIC_H_
#define BACKFOLD_BASE_ARITHMETIC_H_

#include <cfloat>
#include <cstdint>

#include "base/convert.h"
#include "base/host_device.h"

namespace backfold::core {

inline constexpr std::uint32_t kExponentMask = 0x7f80'0000u;
inline constexpr std::uint32_t kStepMask = 0x7fff'0000u;
inline constexpr std::uint32_t kExtended = 0x8000'0000u;
inline constexpr std::uint32_t kFullRange = 0x0004'0000u;

// Beyond this an element's group takes the full-range header: step and minimum could overflow.
inline constexpr float kHuge = 0x1p126f;

// Ranges below this are widened to it, so that no step is subnormal at any width.
inline constexpr float kTiny = 0x1p-110f;

// An ordinary header reaches minima up to this many ranges from zero. The others widen a range that
// is less than a share of the distance: of finite groups, and of those with non-finite elements.
// Rotated groups have ordinary headers only: 1 / kNear, and what rounding may take from it.
inline constexpr float kNear = 128.0f;
inline constexpr float kFarShare = 0x1p-10f;
inline constexpr float kSpecialShare = 0x1p-7f;
inline constexpr float kRotatedShare = 0x1.1p-7f;

// A minimum counts in units of 2^(E - shift), where 2^E <= steps * step < 2^(E + 1).
inline constexpr std::uint32_t kNearShift = 7;
inline constexpr std::uint32_t kFarShift = 2;
inline constexpr std::uint32_t kSpecialShift = 5;

// Where a header has it. The others than ordinary ones keep their kind below.
inline constexpr std::uint32_t kMinimumMask = 0xffff;
inline constexpr std::uint32_t kFarMinimumMask = 0xfffc;

// In the bits of a power of two: what doubles it, and what it is taken from to give its inverse.
inline constexpr std::uint32_t kOctave = 1u << 23;
inline constexpr std::uint32_t kInverse = 254u << 23;

// Added to the bits of a step before the lower 16 are cut off. 0xfffd, not 0xffff: the quotient may
// be two units too large where it should be exact, and a step that fits exactly must stay (codes of
// small integers would no longer be exact).
inline constexpr std::uint32_t kStepRoundUp = 0xfffd;

// What the reserved code of a group with non-finite elements means.
enum Kind : std::uint32_t { kFinite = 0, kPlusInf = 1, kMinusInf = 2, kNan = 3 };

BACKFOLD_HD Kind kind_of(float value) {
  const std::uint32_t bits = bits_of(value);
  if ((bits & kExponentMask) != kExponentMask) return kFinite;
  if ((bits & 0x007f'ffffu) != 0) return kNan;
  return (bits >> 31) != 0 ? kMinusInf : kPlusInf;
}

// The kind of a group that holds elements of kinds a and b.
BACKFOLD_HD Kind join(Kind a, Kind b) {
  if (a == kFinite || a == b) return b;
  return b == kFinite ? a : kNan;
}

template <typename T>
BACKFOLD_HD T element_of(Kind kind) {
  if (kind == kNan) return nan_element<T>();
  return from_double<T>(
      double_of(kind == kPlusInf ? 0x7ff0'0000'0000'0000u : 0xfff0'0000'0000'0000u));
}

// The codes that the finite elements of a group have: first to first + steps.
struct Levels {
  std::int32_t first;
  std::int32_t steps;
  float count;          // steps, as a float
  float inverse_count;  // its reciprocal
  float ceiling;        // what a code is clamped under, see draw()
};

BACKFOLD_HD constexpr Levels levels_for(int bits, bool zero_exact, bool reserve_top) {
  const std::int32_t first = zero_exact ? 1 : 0;
  const std::int32_t steps = (1 << bits) - 1 - first - (reserve_top ? 1 : 0);
  const float count = static_cast<float>(steps);
  return {first, steps, count, steps > 0 ? 1.0f / count : 0.0f, count + 1.5f};
}

// The code that means "not finite" in a group that has such elements.
BACKFOLD_HD constexpr std::uint32_t reserved_code(int bits) { return (1u << bits) - 1u; }

// A group's header and what its elements are drawn with.
struct Range {
  std::uint32_t header = 0;
  float base = 0.0f;     // value of the code `first`
  float inverse = 0.0f;  // 1 / step
};

// A range rounded outward: step as bits, minimum as a count of units and as a number.
struct RoundedRange {
  std::uint32_t step;
  float minimum;
  float base;
};

// Rounds [low, high] outward: base <= low and base + steps * step >= high, up to fp32 rounding.
// unit is 2^(E - unit_shift), and |low| is below 2^15 units (2^13 for an extended header).
//
// The step keeps 8 bits, rounded up: at most 1/128 more. The minimum is a multiple of `unit`,
// rounded down, and unit is at most 1/128 of an ordinary range: at most 1/128 more. Together the
// variance grows by less than 3.2%. unit is a power of two that the decoder reads off steps * step;
// if the outward rounding carries the range over the next power of two, unit doubles and the
// minimum is rounded again.
//
// Products of a code (16 bits) and a step (8 bits) are exact in fp32, so a decoder may fuse or not.
BACKFOLD_HD RoundedRange round_range(float low, float high, float range, std::uint32_t unit_shift,
                                     const Levels& levels) {
  std::uint32_t exponent = bits_of(range) & kExponentMask;
  RoundedRange rounded{};
  for (int round = 0; round < 2; ++round) {
    const std::uint32_t unit = exponent - unit_shift * kOctave;
    rounded.minimum = floorf(low * float_of(kInverse - unit));
    rounded.base = rounded.minimum * float_of(unit);
    const float span = high - rounded.base;
    const float least = float_of(exponent);
    const float quotient = (span < least ? least : span) * levels.inverse_count;
    rounded.step = (bits_of(quotient) + kStepRoundUp) & kStepMask;
    if ((bits_of(levels.count * float_of(rounded.step)) & kExponentMask) == exponent) break;
    exponent += kOctave;
  }
  return rounded;
}

BACKFOLD_HD std::uint32_t low_half(float minimum) {
  return static_cast<std::uint32_t>(static_cast<std::int32_t>(minimum));
}

// The header of a group that spans [low, high], low <= high, both within +-kHuge. Where low == high
// the range is widened just enough for the header to reach the value. `extend` asks for an extended
// header whether it is needed or not.
BACKFOLD_HD Range round_outward(float low, float high, const Levels& levels, Kind kind,
                                bool extend = false) {
  const float distance = low < 0.0f ? -low : low;
  float range = high - low;
  range = range < kTiny ? kTiny : range;
  const bool near = !extend && kind == kFinite && distance <= range * kNear;
  const float reach = near ? 0.0f : distance * (kind == kFinite ? kFarShare : kSpecialShare);
  range = range < reach ? reach : range;
  const std::uint32_t unit_shift = near ? kNearShift : kind == kFinite ? kFarShift : kSpecialShift;
  const RoundedRange rounded = round_range(low, high, range, unit_shift, levels);
  const std::uint32_t minimum = low_half(rounded.minimum);
  const std::uint32_t header =
      near ? rounded.step | (minimum & kMinimumMask)
           : kExtended | rounded.step | (minimum << 2 & kFarMinimumMask) | kind;
  return {header, rounded.base, reciprocal(float_of(rounded.step))};
}

// The same for a rotated group, whose header must be an ordinary one: a range too far from zero for
// that is widened.
BACKFOLD_HD Range round_outward_rotated(float low, float high, const Levels& levels) {
  const float least = low + (low < 0.0f ? -low : low) * kRotatedShare;
  high = high < least ? least : high;
  const float range = high - low;
  const RoundedRange rounded =
      round_range(low, high, range < kTiny ? kTiny : range, kNearShift, levels);
  return {rounded.step | (low_half(rounded.minimum) & kMinimumMask), rounded.base,
          reciprocal(float_of(rounded.step))};
}

// The code of a finite element, counted from `first`. `uniform` is in [1, 2).
//
// Truncating z + uniform with E[uniform] = 3/2 gives floor(z) + 1 or one more, with the fraction of
// z as the probability of the latter. z may pass `steps` by a rounding error and z + uniform may
// round up to steps + 2: the ceiling of steps + 3/2 keeps the code in range whatever happens.
BACKFOLD_HD std::uint32_t draw(float value, float base, float inverse, float uniform,
                               const Levels& levels) {
  const float raised = fused(value - base, inverse, uniform);
  const float clamped = raised < levels.ceiling ? raised : levels.ceiling;
#ifdef __CUDA_ARCH__
  // Adding 2^23 - 1 downward leaves the integer in the low bits and keeps off the conversion unit,
  // a quarter of the rate of an add.
  return __float_as_uint(__fadd_rd(clamped, 8388607.0f)) - 0x4b00'0000u;
#else
  return static_cast<std::uint32_t>(static_cast<std::int32_t>(clamped)) - 1u;
#endif
}

// What a decoder needs of an ordinary or extended header.
struct Grid {
  float base;
  float step;
};

BACKFOLD_HD Kind kind_in(std::uint32_t header) {
  if ((header & kExponentMask) == kExponentMask)
    return static_cast<Kind>((header & kExtended) != 0 ? header >> 21 & 3u : header >> 16 & 3u);
  return static_cast<Kind>((header & kExtended) != 0 ? header & 3u : 0u);
}

// 2^-shift.
BACKFOLD_HD float unit_scale(std::uint32_t shift) { return float_of((127u - shift) * kOctave); }

BACKFOLD_HD Grid grid_in(std::uint32_t header, const Levels& levels) {
  const float step = float_of(header & kStepMask);
  const float octave = float_of(bits_of(levels.count * step) & kExponentMask);
  const std::int32_t low_half = static_cast<std::int16_t>(header & kMinimumMask);
  if ((header & kExtended) == 0)
    return {static_cast<float>(low_half) * (octave * unit_scale(kNearShift)), step};
  const float unit = octave * unit_scale((header & 3u) == kFinite ? kFarShift : kSpecialShift);
  return {static_cast<float>(low_half >> 2) * unit, step};
}

// Whether the values of all codes are well below FLT_MAX, as in every packet that pack() wrote.
// Kernels leave other grids to code that minds overflow.
BACKFOLD_HD bool is_moderate(const Grid& grid, const Levels& levels) {
  return (grid.base < 0.0f ? -grid.base : grid.base) + levels.count * grid.step <= 0x1p127f;
}

// The grid of a rotated group's decoder, with the rotation's 1/128 in it. Exact, and sums of 128
// values stay below FLT_MAX: scaled afterwards, one element of 2^120 among zeros would decode to
// infinity.
BACKFOLD_HD Grid scaled_for_rotation(const Grid& grid) {
  return {grid.base * 0x1p-7f, grid.step * 0x1p-7f};
}

// The value of a code counted from `first`.
BACKFOLD_HD float value_of(std::uint32_t code, const Grid& grid) {
  return fused(static_cast<float>(code), grid.step, grid.base);
}

// Full range: codes over all of fp32, for groups that reach beyond kHuge.
BACKFOLD_HD double full_range_position(float value, const Levels& levels) {
  const double share = static_cast<double>(value) / FLT_MAX;
  return (levels.first != 0 ? share : (share + 1.0) * 0.5) * levels.steps;
}

BACKFOLD_HD std::uint32_t full_range_draw(float value, float uniform, const Levels& levels) {
  const double raised = full_range_position(value, levels) + static_cast<double>(uniform);
  const double ceiling = static_cast<double>(levels.ceiling);
  return static_cast<std::uint32_t>(
             static_cast<std::int32_t>(raised < ceiling ? raised : ceiling)) -
         1u;
}

BACKFOLD_HD float full_range_value(std::uint32_t code, const Levels& levels) {
  const double steps = levels.steps > 0 ? levels.steps : 1;
  const double share = static_cast<double>(code) / steps;
  return static_cast<float>((levels.first != 0 ? share : share * 2.0 - 1.0) * FLT_MAX);
}

// One bit with non-finite elements: the mean of the finite ones. Their sum is taken in integers, so
// that the order of summation does not matter.
BACKFOLD_HD std::int64_t mean_term(float value, float largest) {
  const double scale = double_of((1023u + 31u + 127u - (bits_of(largest) >> 23 & 0xffull)) << 52);
  const double scaled = static_cast<double>(value) * scale;  // below 2^32
  return static_cast<std::int64_t>(scaled < 0 ? scaled - 0.5 : scaled + 0.5);
}

BACKFOLD_HD std::uint32_t mean_header(std::int64_t sum, std::int32_t count, float largest,
                                      Kind kind) {
  const double scale = double_of((1023u + 31u + 127u - (bits_of(largest) >> 23 & 0xffull)) << 52);
  const double mean = count > 0 ? static_cast<double>(sum) / count / scale : 0.0;
  // The upper 21 bits, rounded to nearest; a carry out of the mantissa moves into the exponent, and
  // the mean's magnitude is at most FLT_MAX, whose own upper bits must not round up to infinity.
  std::uint32_t bits = bits_of(static_cast<float>(mean));
  if ((bits & 0x7fff'ffffu) < 0x7f7f'fc00u) bits += 0x3ffu + (bits >> 11 & 1u);
  return kExtended | kExponentMask | static_cast<std::uint32_t>(kind) << 21 | bits >> 11;
}

BACKFOLD_HD float mean_in(std::uint32_t header) { return float_of(header << 11); }

// Rotation of 128 elements: signs, then butterflies of stride 1, 2, ..., 64, in fp32.
inline constexpr int kRotation = 128;

// Signs of elements 32 * word to 32 * word + 31; a set bit flips. One fixed draw: data know nothing
// of it, and a decoder needs no key. Element i's bit is sign_bit(i); neighbours' are 16 apart, as
// the sign bits of two 16-bit numbers in a register are.
BACKFOLD_HD constexpr int sign_bit(int i) { return i % 32 / 2 + i % 2 * 16; }
BACKFOLD_HD constexpr std::uint32_t rotation_signs(int word) {
  switch (word) {
    case 0:
      return 0x9d3f'81c6u;
    case 1:
      return 0x2e5b'd497u;
    case 2:
      return 0x71a8'3fe2u;
    default:
      return 0xc40d'b65bu;
  }
}

}  // namespace backfold::core

#endif  // BACKFOLD_BASE_ARITHMETIC_H_
