// SPDX-License-Identifier: Apache-2.0
//
// SIMD kernels of pooling.

#ifndef BACKFOLD_POOL_SIMD_POOL_H_
#define BACKFOLD_POOL_SIMD_POOL_H_

#include <cstdint>

#include "backfold/types.h"
#include "pool/reference.h"

namespace backfold::cpu {

struct PoolKernels {
  std::int64_t target;  // Highway's bit of the one they were compiled for
  // Bands begin to end - 1.
  void (*pack)(const core::PoolShape& shape, ElementType type, const void* source,
               core::MixedKey key, const core::PoolParts& parts, std::int64_t begin,
               std::int64_t end);
  void (*unpack)(const core::PoolShape& shape, ElementType type, const core::PoolParts& parts,
                 void* destination, std::int64_t begin, std::int64_t end);
};

// The kernels of a SIMD target, by Highway's bit.
PoolKernels pool_kernels(std::int64_t target_bit);

}  // namespace backfold::cpu

#endif  // BACKFOLD_POOL_SIMD_POOL_H_
