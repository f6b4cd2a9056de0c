// SPDX-License-Identifier: Apache-2.0
//
// How one element becomes one bit, for host code and CUDA kernels.
//
// Every comparison is made on integers that order like the numbers. So SIMD registers hold as many
// 16-bit elements as they can, no conversion or flush mode comes between, and one test serves every
// comparison and type: is the integer in a range, and not in a hole in it?

#ifndef BACKFOLD_BASE_BITS_H_
#define BACKFOLD_BASE_BITS_H_

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "base/convert.h"
#include "base/host_device.h"

namespace backfold::core {

// Elements whose bits fill one unit of payload alignment. Threads split on multiples of it.
inline constexpr std::int64_t kBitBlock = 128;
inline constexpr std::int64_t kBitBlockBytes = kBitBlock / 8;

// Bytes that the bits of `count` elements take, padding included.
constexpr std::size_t bit_bytes(std::int64_t count) {
  return static_cast<std::size_t>((count + kBitBlock - 1) / kBitBlock * kBitBlockBytes);
}

// An unsigned integer whose value, read as signed, orders like the float of those bits: -0 is -1,
// just below +0; positive NaNs are above +inf, negative ones below -inf. key(-x) = -1 - key(x).
template <typename U>
BACKFOLD_HD U order_key(U bits) {
  using S = std::make_signed_t<U>;
  const U sign = static_cast<U>(static_cast<S>(bits) >> (8 * sizeof(U) - 1));
  return static_cast<U>(bits ^ (sign & static_cast<U>(static_cast<U>(~U{0}) >> 1)));
}

// A closed range of keys.
struct KeyRange {
  std::int64_t low;
  std::int64_t high;
};

// Bit = (key in range and not in hole) != invert. Ranges are kept as lowest key and length, modulo
// the width of the key: key - low <= span, unsigned.
struct BitTest {
  std::uint64_t low;
  std::uint64_t span;
  std::uint64_t hole_low;
  std::uint64_t hole_span;
  bool has_hole;
  bool invert;
};

// The test for a range less a hole, either of which may be empty (low > high).
inline BitTest make_bit_test(KeyRange range, KeyRange hole, bool invert) {
  if (range.low > range.high) range = hole = {0, 0};
  const bool has_hole = hole.low <= hole.high;
  if (!has_hole) hole = {0, 0};
  return {static_cast<std::uint64_t>(range.low),
          static_cast<std::uint64_t>(range.high) - static_cast<std::uint64_t>(range.low),
          static_cast<std::uint64_t>(hole.low),
          static_cast<std::uint64_t>(hole.high) - static_cast<std::uint64_t>(hole.low),
          has_hole,
          invert};
}

// The test for "any bit of the element is set": masks and bools.
inline BitTest any_bit_set() { return make_bit_test({0, 0}, {0, -1}, true); }

// The test's answer before `invert`, for a key of the width that the test was made for.
template <bool kHole, typename U>
BACKFOLD_HD bool in_range(const BitTest& test, U key) {
  const bool inside = static_cast<U>(key - static_cast<U>(test.low)) <= static_cast<U>(test.span);
  if (!kHole) return inside;
  return inside &&
         static_cast<U>(key - static_cast<U>(test.hole_low)) > static_cast<U>(test.hole_span);
}

template <typename U>
BACKFOLD_HD bool evaluate(const BitTest& test, U bits) {
  const U key = order_key(bits);
  return (test.has_hole ? in_range<true>(test, key) : in_range<false>(test, key)) != test.invert;
}

// What a 1 and a 0 unpack to, as the bits of an element.
struct BitValues {
  std::uint64_t if_true;
  std::uint64_t if_false;
};

}  // namespace backfold::core

#endif  // BACKFOLD_BASE_BITS_H_
