// SPDX-License-Identifier: Apache-2.0
//
// Codes of 1, 2, 4 or 8 bits in the order of their elements: code i stands at bit i * width,
// counted from the least significant bit of the first byte.

#ifndef BACKFOLD_BASE_CODES_H_
#define BACKFOLD_BASE_CODES_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/checks.h"

namespace backfold::core {

// Bytes of a plane of codes, padding included.
constexpr std::size_t plane_bytes(int width, std::int64_t count) {
  return padded((static_cast<std::size_t>(count) * static_cast<std::size_t>(width) + 7) / 8);
}

// Writes the codes code_at(0) to code_at(count - 1), of which the low `width` bits count, and no
// byte after them.
template <typename CodeAt>
void put_codes(int width, std::int64_t count, const CodeAt& code_at, std::uint8_t* bytes) {
  const int per_byte = 8 / width;
  for (std::int64_t i = 0; i < count; i += per_byte) {
    std::uint32_t byte = 0;
    for (int k = 0; k < per_byte && i + k < count; ++k)
      byte |= (code_at(i + k) & ((1u << width) - 1u)) << width * k;
    bytes[i / per_byte] = static_cast<std::uint8_t>(byte);
  }
}

inline std::uint32_t get_code(int width, const std::uint8_t* bytes, std::int64_t i) {
  const int per_byte = 8 / width;
  return static_cast<std::uint32_t>(bytes[i / per_byte]) >> i % per_byte * width &
         ((1u << width) - 1u);
}

// Eight codes, one to a byte, moved together: the low 8 * kWidth bits of the result, the others are
// anything. Bits of a byte above its code are ignored.
template <int kWidth>
std::uint64_t fold_codes(std::uint64_t x) {
  if constexpr (kWidth < 8) {
    x &= 0x0101'0101'0101'0101u * ((1u << kWidth) - 1u);
    x = (x | x >> (8 - kWidth)) & 0x0001'0001'0001'0001u * ((1u << 2 * kWidth) - 1u);
    x = (x | x >> 2 * (8 - kWidth)) & 0x0000'0001'0000'0001u * ((1u << 4 * kWidth) - 1u);
    x |= x >> 4 * (8 - kWidth);
  }
  return x;
}

// The inverse. Bits of x above 8 * kWidth are ignored.
template <int kWidth>
std::uint64_t spread_codes(std::uint64_t x) {
  if constexpr (kWidth < 8) {
    x = (x | x << 4 * (8 - kWidth)) & 0x0000'0001'0000'0001u * ((1u << 4 * kWidth) - 1u);
    x = (x | x << 2 * (8 - kWidth)) & 0x0001'0001'0001'0001u * ((1u << 2 * kWidth) - 1u);
    x = (x | x << (8 - kWidth)) & 0x0101'0101'0101'0101u * ((1u << kWidth) - 1u);
  }
  return x;
}

// Eight codes of kWidth bits. Moved as one integer of that size: parts of a longer one would not
// pass from a store to a load (three times the time).
template <int kWidth>
using EightCodes = std::conditional_t<
    kWidth == 1, std::uint8_t,
    std::conditional_t<kWidth == 2, std::uint16_t,
                       std::conditional_t<kWidth == 4, std::uint32_t, std::uint64_t>>>;

// Codes one to a byte, shifted right by kShift, into a plane, and no byte after them. `codes`
// reaches up to a multiple of 8, with zeros past `count`.
template <int kWidth, int kShift = 0>
void fold_block(const std::uint8_t* codes, std::int64_t count, std::uint8_t* plane) {
  for (std::int64_t i = 0; i < count; i += 8, plane += kWidth) {
    std::uint64_t word;
    std::memcpy(&word, codes + i, sizeof(word));
    const auto folded = static_cast<EightCodes<kWidth>>(fold_codes<kWidth>(word >> kShift));
    if (i + 8 <= count)
      std::memcpy(plane, &folded, kWidth);
    else
      std::memcpy(plane, &folded, static_cast<std::size_t>((count - i) * kWidth + 7) / 8);
  }
}

// A plane's codes one to a byte, shifted left by kShift; a shift of 0 sets the bytes, another one
// adds to them. `codes` has room up to a multiple of 8.
template <int kWidth, int kShift = 0>
void spread_block(const std::uint8_t* plane, std::int64_t count, std::uint8_t* codes) {
  for (std::int64_t i = 0; i < count; i += 8, plane += kWidth) {
    EightCodes<kWidth> folded = 0;
    if (i + 8 <= count)
      std::memcpy(&folded, plane, kWidth);
    else
      std::memcpy(&folded, plane, static_cast<std::size_t>((count - i) * kWidth + 7) / 8);
    std::uint64_t word = spread_codes<kWidth>(folded) << kShift;
    if constexpr (kShift != 0) {
      std::uint64_t before;
      std::memcpy(&before, codes + i, sizeof(before));
      word |= before;
    }
    std::memcpy(codes + i, &word, sizeof(word));
  }
}

}  // namespace backfold::core

#endif  // BACKFOLD_BASE_CODES_H_
