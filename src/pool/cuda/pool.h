// SPDX-License-Identifier: Apache-2.0
//
// CUDA kernels of pooling. Arguments have been checked; pointers are to device memory.

#ifndef BACKFOLD_POOL_CUDA_POOL_H_
#define BACKFOLD_POOL_CUDA_POOL_H_

#include "backfold/status.h"
#include "backfold/types.h"
#include "base/rng.h"
#include "pool/geometry.h"

namespace backfold::cuda {

// Writes the whole payload, padding included.
Status pack_pool(const core::PoolShape& shape, ElementType type, const void* source,
                 core::MixedKey key, void* payload, void* stream);

Status unpack_pool(const core::PoolShape& shape, ElementType type, const void* payload,
                   void* destination, void* stream);

}  // namespace backfold::cuda

#endif  // BACKFOLD_POOL_CUDA_POOL_H_
