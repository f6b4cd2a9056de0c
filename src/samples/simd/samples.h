// SPDX-License-Identifier: Apache-2.0
//
// SIMD kernels of the sample quantizer: scores. Its codes are runs of the group quantizer's.

#ifndef BACKFOLD_SAMPLES_SIMD_SAMPLES_H_
#define BACKFOLD_SAMPLES_SIMD_SAMPLES_H_

#include <cstdint>

#include "backfold/samples.h"

namespace backfold::cpu {

struct SampleKernels {
  std::int64_t target;  // Highway's bit of the one they were compiled for
  // The score of the sample whose elements start at `first`.
  float (*score)(const SampleFormat& format, const void* first);
};

// The kernels of a SIMD target, by Highway's bit.
SampleKernels sample_kernels(std::int64_t target_bit);

}  // namespace backfold::cpu

#endif  // BACKFOLD_SAMPLES_SIMD_SAMPLES_H_
