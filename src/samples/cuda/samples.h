// SPDX-License-Identifier: Apache-2.0
//
// CUDA kernels of the sample quantizer. Arguments have been checked; pointers are to device memory.

#ifndef BACKFOLD_SAMPLES_CUDA_SAMPLES_H_
#define BACKFOLD_SAMPLES_CUDA_SAMPLES_H_

#include "backfold/samples.h"
#include "base/rng.h"

namespace backfold::cuda {

Status pack_samples(const SampleFormat& format, const void* source, const float* weights,
                    core::MixedKey key, void* payload, void* stream);
Status unpack_samples(const SampleFormat& format, const void* payload, void* destination,
                      void* stream);

}  // namespace backfold::cuda

#endif  // BACKFOLD_SAMPLES_CUDA_SAMPLES_H_
