// SPDX-License-Identifier: Apache-2.0
//
// The rotation of 128 elements that lie over the lanes of a warp as flat groups do: element
// 32 * k + lane * V + j is number j of vector k of a lane, V elements to a vector.

#ifndef BACKFOLD_GROUP_CUDA_ROTATION_CUH_
#define BACKFOLD_GROUP_CUDA_ROTATION_CUH_

#include <cstdint>

#include "base/arithmetic.h"
#include "base/cuda/elements.cuh"
#include "group/cuda/range.cuh"

namespace backfold::cuda {

// H x over the 128 elements of kLanes lanes: element 32 * k + lane * V + j.
template <typename T>
__device__ inline void lanes_hadamard(float (&x)[4][kVector<T>], int lane) {
  constexpr int kV = kVector<T>;
#pragma unroll
  for (int stride = 1; stride < kV; stride *= 2) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int j = 0; j < kV; ++j) {
        if ((j & stride) != 0) continue;
        const float a = x[k][j], b = x[k][j + stride];
        x[k][j] = a + b;
        x[k][j + stride] = a - b;
      }
    }
  }
#pragma unroll
  for (int distance = 1; distance < 32 / kV; distance *= 2) {
    const float sign = (lane & distance) != 0 ? -1.0f : 1.0f;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int j = 0; j < kV; ++j)
        x[k][j] = __fmaf_rn(x[k][j], sign, __shfl_xor_sync(kFullWarp, x[k][j], distance));
    }
  }
#pragma unroll
  for (int stride = 1; stride < 4; stride *= 2) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if ((k & stride) != 0) continue;
#pragma unroll
      for (int j = 0; j < kV; ++j) {
        const float a = x[k][j], b = x[k + stride][j];
        x[k][j] = a + b;
        x[k + stride][j] = a - b;
      }
    }
  }
}

// D x on the lane's elements as they lie in memory. The sign bits of neighbours are 16 apart in
// their word, so one shift serves both elements of a 16-bit pair.
template <typename T>
__device__ inline uint4 flip_vector(uint4 raw, int k, int lane) {
  constexpr int kV = kVector<T>;
  const std::uint32_t signs = core::rotation_signs(k) >> lane * (kV / 2);
  const auto even = [&](int pair) { return signs << (31 - pair) & 0x8000'0000u; };
  const auto odd = [&](int pair) { return signs << (15 - pair) & 0x8000'0000u; };
  const auto both = [&](int pair) { return signs << (15 - pair) & 0x8000'8000u; };
  if constexpr (sizeof(T) == 2)
    return make_uint4(raw.x ^ both(0), raw.y ^ both(1), raw.z ^ both(2), raw.w ^ both(3));
  if constexpr (sizeof(T) == 4)
    return make_uint4(raw.x ^ even(0), raw.y ^ odd(0), raw.z ^ even(1), raw.w ^ odd(1));
  return make_uint4(raw.x, raw.y ^ even(0), raw.z, raw.w ^ odd(0));
}

// Whether the lanes of a group hold one bit pattern only.
template <typename T, int kLanes>
__device__ inline bool lanes_constant(const uint4 (&raw)[4], int warp_lane) {
  const std::uint32_t own = sizeof(T) == 2 ? __byte_perm(raw[0].x, 0, 0x1010) : raw[0].x;
  const int leader = warp_lane / kLanes * kLanes;
  const std::uint32_t low = __shfl_sync(kFullWarp, own, leader);
  const std::uint32_t high = sizeof(T) == 8 ? __shfl_sync(kFullWarp, raw[0].y, leader) : low;
  const unsigned lanes = (kLanes == 32 ? kFullWarp : (1u << kLanes % 32) - 1u) << leader;
  // Nearly always the first two words tell.
  std::uint32_t difference = (raw[0].x ^ low) | (raw[0].y ^ high);
  bool constant = (__ballot_sync(kFullWarp, difference != 0) & lanes) == 0;
  if (__any_sync(kFullWarp, constant)) {
#pragma unroll
    for (int k = 0; k < 4; ++k)
      difference |= (raw[k].x ^ low) | (raw[k].y ^ high) | (raw[k].z ^ low) | (raw[k].w ^ high);
    constant = (__ballot_sync(kFullWarp, difference != 0) & lanes) == 0;
  }
  return constant;
}

// The extremes of rotated elements over the lanes of a group. Coefficients have both signs but for
// rare groups; then the largest is that of the bits as signed integers and the smallest that as
// unsigned ones, and Hopper takes the maximum of three integers in one instruction.
template <typename T, int kLanes>
__device__ inline Extremes rotated_extremes(const float (&x)[4][kVector<T>]) {
  constexpr int kV = kVector<T>;
  int high = __float_as_int(x[0][0]);
  unsigned low = __float_as_uint(x[0][0]);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
#pragma unroll
    for (int j = 0; j < kV; j += 2) {
      high = __vimax3_s32(high, __float_as_int(x[k][j]), __float_as_int(x[k][j + 1]));
      low = __vimax3_u32(low, __float_as_uint(x[k][j]), __float_as_uint(x[k][j + 1]));
    }
  }
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) {
    high = max(high, __shfl_xor_sync(kFullWarp, high, distance));
    low = max(low, __shfl_xor_sync(kFullWarp, low, distance));
  }
  Extremes extremes{__uint_as_float(low), __int_as_float(high)};
  if (__any_sync(kFullWarp, high < 0 || static_cast<int>(low) >= 0)) {
    extremes = {x[0][0], x[0][0]};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int j = 0; j < kV; ++j) {
        extremes.low = min_nan(extremes.low, x[k][j]);
        extremes.high = max_nan(extremes.high, x[k][j]);
      }
    }
    extremes = across_lanes<kLanes>(extremes);
  }
  return extremes;
}

}  // namespace backfold::cuda

#endif  // BACKFOLD_GROUP_CUDA_ROTATION_CUH_
