// SPDX-License-Identifier: Apache-2.0
//
// SIMD kernels of the ranged quantizer. Their contracts are those of the reference
// (ranged/reference.h).

#ifndef BACKFOLD_RANGED_SIMD_RANGED_H_
#define BACKFOLD_RANGED_SIMD_RANGED_H_

#include <cstdint>

#include "backfold/ranged.h"
#include "ranged/arithmetic.h"

namespace backfold::cpu {

struct RangedKernels {
  std::int64_t target;  // Highway's bit of the one they were compiled for
  bool (*pack)(const RangedFormat& format, const void* source, const core::Grid* grids,
               core::MixedKey key, std::int64_t first, std::int64_t count, std::uint8_t* codes);
  void (*unpack)(const RangedFormat& format, const core::Grid* grids, const std::uint8_t* codes,
                 std::int64_t first, std::int64_t count, void* destination);
  void (*widen_run)(ElementType type, const void* source, std::int64_t count, core::Bounds* bounds);
  void (*widen_row)(ElementType type, const void* source, std::int64_t count, core::Bounds* bounds);
};

// The kernels of a SIMD target, by Highway's bit.
RangedKernels ranged_kernels(std::int64_t target_bit);

}  // namespace backfold::cpu

#endif  // BACKFOLD_RANGED_SIMD_RANGED_H_
