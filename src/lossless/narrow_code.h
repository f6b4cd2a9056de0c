// SPDX-License-Identifier: Apache-2.0
//
// How one integer becomes a narrow code and comes back, for host code and CUDA kernels.

#ifndef BACKFOLD_LOSSLESS_NARROW_CODE_H_
#define BACKFOLD_LOSSLESS_NARROW_CODE_H_

#include <cstddef>
#include <cstdint>

#include "base/host_device.h"

namespace backfold::core {

// Arithmetic is modulo 2^(bits of the element), so nothing overflows. A format without a sentinel
// has low as its sentinel and 0 as the code of that, which changes nothing and saves a case.
struct NarrowCode {
  std::uint64_t low;
  std::uint64_t sentinel;
  std::uint64_t sentinel_code;
  std::uint64_t span;  // high - low
  int code_bytes;      // 1, 2 or 4
};

template <typename C, typename U>
BACKFOLD_HD C encode(const NarrowCode& code, U element) {
  if (element == static_cast<U>(code.sentinel)) return static_cast<C>(code.sentinel_code);
  return static_cast<C>(element - static_cast<U>(code.low));
}

template <typename U, typename C>
BACKFOLD_HD U decode(const NarrowCode& code, C value) {
  if (value == static_cast<C>(code.sentinel_code)) return static_cast<U>(code.sentinel);
  return static_cast<U>(static_cast<U>(code.low) + static_cast<U>(value));
}

template <typename U>
BACKFOLD_HD bool keeps_bound(const NarrowCode& code, U element) {
  return element == static_cast<U>(code.sentinel) ||
         static_cast<U>(element - static_cast<U>(code.low)) <= static_cast<U>(code.span);
}

// Calls work.operator()<Element, Code>() with the unsigned integers of a format's elements and
// codes.
template <typename Work>
void with_narrow_types(std::size_t element_bytes, int code_bytes, const Work& work) {
  if (element_bytes == 2) return work.template operator()<std::uint16_t, std::uint8_t>();
  if (element_bytes == 4 && code_bytes == 1)
    return work.template operator()<std::uint32_t, std::uint8_t>();
  if (element_bytes == 4) return work.template operator()<std::uint32_t, std::uint16_t>();
  if (code_bytes == 1) return work.template operator()<std::uint64_t, std::uint8_t>();
  if (code_bytes == 2) return work.template operator()<std::uint64_t, std::uint16_t>();
  work.template operator()<std::uint64_t, std::uint32_t>();
}

}  // namespace backfold::core

#endif  // BACKFOLD_LOSSLESS_NARROW_CODE_H_
