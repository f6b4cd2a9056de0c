// SPDX-License-Identifier: Apache-2.0
//
// Smallest and largest elements. Minimum and maximum pass NaN on, so that a special element shows
// in the result.

#ifndef BACKFOLD_GROUP_CUDA_RANGE_CUH_
#define BACKFOLD_GROUP_CUDA_RANGE_CUH_

#include <cstdint>

#include "base/arithmetic.h"
#include "base/cuda/elements.cuh"
#include "group/cuda/task.cuh"

namespace backfold::cuda {

__device__ inline float min_nan(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
__device__ inline float max_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

__device__ inline std::uint32_t min2(std::uint32_t a, std::uint32_t b, BFloat) {
  asm("min.NaN.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}
__device__ inline std::uint32_t max2(std::uint32_t a, std::uint32_t b, BFloat) {
  asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}
__device__ inline std::uint32_t min2(std::uint32_t a, std::uint32_t b, Half) {
  asm("min.NaN.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}
__device__ inline std::uint32_t max2(std::uint32_t a, std::uint32_t b, Half) {
  asm("max.NaN.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}

struct Extremes {
  float low, high;

  __device__ bool within_limits() const { return low >= -core::kHuge && high <= core::kHuge; }
  // Two values at least, none of them special: the fast path serves the group.
  __device__ bool plain() const { return within_limits() && low < high; }
};

// In zero-exact mode zeros do not count, and positive elements are no smaller than a normal number.
__device__ inline float positive_low(float value) {
  return value > 0.0f ? fmaxf(value, 0x1p-126f) : __int_as_float(0x7f80'0000);
}

// Extremes over the lanes of a group, `lanes` neighbours of a warp (a power of two).
template <int kLanes>
__device__ inline Extremes across_lanes(Extremes extremes) {
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) {
    extremes.low = min_nan(extremes.low, __shfl_xor_sync(kFullWarp, extremes.low, distance));
    extremes.high = max_nan(extremes.high, __shfl_xor_sync(kFullWarp, extremes.high, distance));
  }
  return extremes;
}

}  // namespace backfold::cuda

#endif  // BACKFOLD_GROUP_CUDA_RANGE_CUH_
