// SPDX-License-Identifier: Apache-2.0
//
// Codes in the low bits of the float 2^23 + code, which keeps them off the conversion unit, a
// quarter of the rate of an add.

#ifndef BACKFOLD_BASE_CUDA_MAGIC_CUH_
#define BACKFOLD_BASE_CUDA_MAGIC_CUH_

#include <cstdint>

namespace backfold::cuda {

inline constexpr std::uint32_t kMagic = 0x4b00'0000u;  // the bits of 2^23

// floor(raised) - 1, with kMagic on top. `raised` is at least 1.
__device__ inline std::uint32_t magic_floor(float raised) {
  return __float_as_uint(__fadd_rd(raised, 8388607.0f));
}

// The code of a value, with kMagic on top (arithmetic.h's draw(), less the subtraction).
__device__ inline std::uint32_t magic_draw(float value, float base, float inverse, float uniform,
                                           float ceiling) {
  return magic_floor(fminf(__fmaf_rn(__fsub_rn(value, base), inverse, uniform), ceiling));
}

// The code of bits that have kMagic on top, as a float.
__device__ inline float magic_number(std::uint32_t placed) {
  return __uint_as_float(placed) - 8388608.0f;
}

}  // namespace backfold::cuda

#endif  // BACKFOLD_BASE_CUDA_MAGIC_CUH_
