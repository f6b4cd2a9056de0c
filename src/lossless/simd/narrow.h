// SPDX-License-Identifier: Apache-2.0
//
// SIMD kernels of narrowed integers.

#ifndef BACKFOLD_LOSSLESS_SIMD_NARROW_H_
#define BACKFOLD_LOSSLESS_SIMD_NARROW_H_

#include <cstddef>
#include <cstdint>

#include "lossless/narrow_code.h"

namespace backfold::cpu {

struct NarrowKernels {
  std::int64_t target;  // Highway's bit of the one they were compiled for
  // Writes the codes of `count` elements and nothing after them.
  void (*encode)(const core::NarrowCode& code, std::size_t element_bytes, const void* source,
                 std::int64_t count, void* codes);
  void (*decode)(const core::NarrowCode& code, std::size_t element_bytes, const void* codes,
                 std::int64_t count, void* destination);
};

// The kernels of a SIMD target, by Highway's bit.
NarrowKernels narrow_kernels(std::int64_t target_bit);

}  // namespace backfold::cpu

#endif  // BACKFOLD_LOSSLESS_SIMD_NARROW_H_
