// SPDX-License-Identifier: Apache-2.0
//
// SIMD kernels of predicates and masks.

#ifndef BACKFOLD_LOSSLESS_SIMD_BITS_H_
#define BACKFOLD_LOSSLESS_SIMD_BITS_H_

#include <cstddef>
#include <cstdint>

#include "base/bits.h"

namespace backfold::cpu {

struct BitKernels {
  std::int64_t target;  // Highway's bit of the one they were compiled for
  // Packs `count` elements of 1, 2, 4 or 8 bytes into bit_bytes(count) bytes.
  void (*pack)(const core::BitTest& test, std::size_t element_bytes, const void* source,
               std::int64_t count, std::uint8_t* bits);
  // Reads bit_bytes(count) bytes and writes `count` elements.
  void (*unpack)(const core::BitValues& values, std::size_t element_bytes, const std::uint8_t* bits,
                 std::int64_t count, void* destination);
};

// The kernels of a SIMD target, by Highway's bit.
BitKernels bit_kernels(std::int64_t target_bit);

}  // namespace backfold::cpu

#endif  // BACKFOLD_LOSSLESS_SIMD_BITS_H_
