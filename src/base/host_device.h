// SPDX-License-Identifier: Apache-2.0
//
// One spelling for functions that host code and CUDA kernels share, and for the few operations
// whose rounding they must agree on.

#ifndef BACKFOLD_BASE_HOST_DEVICE_H_
#define BACKFOLD_BASE_HOST_DEVICE_H_

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define BACKFOLD_HD __host__ __device__ inline
// Before a function that calls what it is given: its argument may be for one side alone.
#define BACKFOLD_ANY_CALLABLE _Pragma("nv_exec_check_disable")
#else
#define BACKFOLD_HD inline
#define BACKFOLD_ANY_CALLABLE
#endif

namespace backfold::core {

BACKFOLD_HD std::uint32_t bits_of(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value);
#else
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
#endif
}

BACKFOLD_HD float float_of(std::uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

BACKFOLD_HD std::uint64_t bits_of(double value) {
#ifdef __CUDA_ARCH__
  return static_cast<std::uint64_t>(__double_as_longlong(value));
#else
  std::uint64_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
#endif
}

BACKFOLD_HD double double_of(std::uint64_t bits) {
#ifdef __CUDA_ARCH__
  return __longlong_as_double(static_cast<long long>(bits));
#else
  double value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

// a * b + c with one rounding. Every other product and sum in the core rounds by itself: host and
// device code are compiled without contraction.
BACKFOLD_HD float fused(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

// 1 / value, rounded to nearest.
BACKFOLD_HD float reciprocal(float value) {
#ifdef __CUDA_ARCH__
  return __frcp_rn(value);
#else
  return 1.0f / value;
#endif
}

}  // namespace backfold::core

#endif  // BACKFOLD_BASE_HOST_DEVICE_H_
