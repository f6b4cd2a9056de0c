// SPDX-License-Identifier: Apache-2.0
//
// CUDA kernels of the ranged quantizer. Arguments have been checked; pointers are to device memory.

#ifndef BACKFOLD_RANGED_CUDA_RANGED_H_
#define BACKFOLD_RANGED_CUDA_RANGED_H_

#include "backfold/ranged.h"
#include "base/rng.h"

namespace backfold::cuda {

// Writes the whole payload, padding included.
Status pack_ranged(const RangedFormat& format, const void* source, const float* ranges,
                   core::MixedKey key, void* payload, void* stream);

Status unpack_ranged(const RangedFormat& format, const void* payload, void* destination,
                     void* stream);

Status widen_ranges(const RangedFormat& format, const void* source, const float* ranges,
                    float* widened, void* stream);

}  // namespace backfold::cuda

#endif  // BACKFOLD_RANGED_CUDA_RANGED_H_
