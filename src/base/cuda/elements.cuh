// SPDX-License-Identifier: Apache-2.0
//
// Elements of every type in 16-byte vectors: loads, stores, and fp32 numbers of them.

#ifndef BACKFOLD_BASE_CUDA_ELEMENTS_CUH_
#define BACKFOLD_BASE_CUDA_ELEMENTS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "base/convert.h"

namespace backfold::cuda {

using core::BFloat;
using core::Half;

template <typename T>
inline constexpr int kVector = 16 / static_cast<int>(sizeof(T));

__device__ inline float low_number(std::uint32_t word, BFloat) {
  return __uint_as_float(word << 16);
}
__device__ inline float high_number(std::uint32_t word, BFloat) {
  return __uint_as_float(word & 0xffff'0000u);
}
__device__ inline float low_number(std::uint32_t word, Half) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(word)));
}
__device__ inline float high_number(std::uint32_t word, Half) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(word >> 16)));
}

// The elements of a vector as fp32.
template <typename T>
__device__ inline void to_floats(const uint4& raw, float (&values)[kVector<T>]) {
  const std::uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = __uint_as_float(words[i]);
  } else if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[2 * i] = low_number(words[i], T{});
      values[2 * i + 1] = high_number(words[i], T{});
    }
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      values[i] = core::to_float(
          __hiloint2double(static_cast<int>(words[2 * i + 1]), static_cast<int>(words[2 * i])));
  }
}

__device__ inline std::uint32_t join_numbers(float low, float high, BFloat) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}
// Finite stays finite: what rounds to infinity becomes the largest number.
__device__ inline std::uint32_t join_numbers(float low, float high, Half) {
  const __half2 most = __half2half2(__ushort_as_half(0x7bff));
  const __half2 pair = __hmax2(__hmin2(__floats2half2_rn(low, high), most), __hneg2(most));
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}

// fp32 values of decoded codes (finite, bf16 ones within range) as a vector of elements.
template <typename T>
__device__ inline uint4 from_floats(const float (&values)[kVector<T>]) {
  if constexpr (sizeof(T) == 4) {
    return make_uint4(__float_as_uint(values[0]), __float_as_uint(values[1]),
                      __float_as_uint(values[2]), __float_as_uint(values[3]));
  } else if constexpr (sizeof(T) == 2) {
    return make_uint4(
        join_numbers(values[0], values[1], T{}), join_numbers(values[2], values[3], T{}),
        join_numbers(values[4], values[5], T{}), join_numbers(values[6], values[7], T{}));
  } else {
    const double a = values[0], b = values[1];
    return make_uint4(static_cast<std::uint32_t>(__double2loint(a)),
                      static_cast<std::uint32_t>(__double2hiint(a)),
                      static_cast<std::uint32_t>(__double2loint(b)),
                      static_cast<std::uint32_t>(__double2hiint(b)));
  }
}

// Up to a vector of elements, for tensors that do not start on 16 bytes and for the ends of rows.
// Out of line, to keep their instructions out of the kernels' way.
template <typename T>
__device__ __noinline__ uint4 load_elements(const T* source, int count) {
  uint4 raw = {};
  T* elements = reinterpret_cast<T*>(&raw);
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i)
    if (i < count) elements[i] = source[i];
  return raw;
}
template <typename T>
__device__ __noinline__ void store_elements(T* destination, uint4 raw, int count) {
  const T* elements = reinterpret_cast<const T*>(&raw);
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i)
    if (i < count) destination[i] = elements[i];
}

// `kCount` vectors, the i-th at address(i); `elements` of each are there.
template <int kCount, typename T, typename Address>
__device__ inline void load_vectors(uint4 (&raw)[kCount], Address address, bool aligned,
                                    int elements) {
  if (aligned && elements >= kVector<T>) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) raw[i] = *reinterpret_cast<const uint4*>(address(i));
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) raw[i] = load_elements<T>(address(i), elements);
  }
}
template <int kCount, typename T, typename Address>
__device__ inline void store_vectors(const uint4 (&raw)[kCount], Address address, bool aligned,
                                     int elements) {
  if (aligned && elements >= kVector<T>) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) __stcs(reinterpret_cast<uint4*>(address(i)), raw[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) store_elements<T>(address(i), raw[i], elements);
  }
}

}  // namespace backfold::cuda

#endif  // BACKFOLD_BASE_CUDA_ELEMENTS_CUH_
