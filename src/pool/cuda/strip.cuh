// SPDX-License-Identifier: Apache-2.0
//
// Strips of pooled tensors: elements side by side, as words and as numbers.

#ifndef BACKFOLD_POOL_CUDA_STRIP_CUH_
#define BACKFOLD_POOL_CUDA_STRIP_CUH_

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "base/cuda/elements.cuh"
#include "pool/cuda/task.cuh"

namespace backfold::cuda {

__device__ inline float number_of(float element) { return element; }
__device__ inline float number_of(double element) { return core::to_float(element); }
__device__ inline float number_of(BFloat element) { return core::to_float(element); }
__device__ inline float number_of(Half element) { return low_number(element.bits, Half{}); }

// Neighbouring elements moved in few instructions.
template <typename T, int kCount>
union Neighbours {
  static constexpr int kBytes = static_cast<int>(sizeof(T)) * kCount, kWords = kBytes / 4;
  using Unit =
      std::conditional_t<kBytes == 4, std::uint32_t, std::conditional_t<kBytes == 8, uint2, uint4>>;
  static constexpr int kUnits = kBytes / static_cast<int>(sizeof(Unit));
  Unit units[kUnits];
  std::uint32_t words[kWords];
  T items[kCount];

  __device__ void load(const T* from) {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) units[i] = reinterpret_cast<const Unit*>(from)[i];
  }
  __device__ void store(T* to) const {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) reinterpret_cast<Unit*>(to)[i] = units[i];
  }
  __device__ void to_numbers(float* x) const {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if constexpr (sizeof(T) == 2) {
        x[j] = j % 2 == 0 ? low_number(words[j / 2], T{}) : high_number(words[j / 2], T{});
      } else {
        x[j] = number_of(items[j]);
      }
    }
  }
  // Of numbers that are far below the type's limits, or for fp16.
  __device__ void from_numbers(const float* x) {
#pragma unroll
    for (int j = 0; j < kCount; j += 2) {
      if constexpr (sizeof(T) == 2) {
        words[j / 2] = join_numbers(x[j], x[j + 1], T{});
      } else {
        items[j] = x[j], items[j + 1] = x[j + 1];
      }
    }
  }
  // The bits of word i that belong to the first `count` elements.
  __device__ static std::uint32_t mask_of(int i, int count) {
    if constexpr (sizeof(T) == 2)
      return count >= 2 * i + 2 ? ~0u : count == 2 * i + 1 ? 0xffffu : 0u;
    return i < count * static_cast<int>(sizeof(T) / 4) ? ~0u : 0u;
  }
  // The first element in word i of as many copies of it.
  __device__ std::uint32_t first_in(int i) const {
    if constexpr (sizeof(T) == 2) {
      return __byte_perm(words[0], 0, 0x1010);
    } else {
      return words[i % static_cast<int>(sizeof(T) / 4)];
    }
  }
};

// The least and the largest of the numbers seen. (Of NaN the other ones.)
template <typename T>
struct StripExtremes {
  float least = INFINITY, most = -INFINITY;

  template <int kCount>
  __device__ void add(const Neighbours<T, kCount>& strip) {
    float x[kCount];
    strip.to_numbers(x);
#pragma unroll
    for (int j = 0; j < kCount; ++j) least = fminf(least, x[j]), most = fmaxf(most, x[j]);
  }
  __device__ float2 numbers() const { return {least, most}; }
};

// Two at a time, in half the instructions.
template <typename T>
requires(sizeof(T) == 2) struct StripExtremes<T> {
  using Two = std::conditional_t<std::is_same_v<T, BFloat>, __nv_bfloat162, __half2>;
  static constexpr std::uint32_t kInfinity =
      std::is_same_v<T, BFloat> ? 0x7f80'7f80u : 0x7c00'7c00u;
  std::uint32_t least = kInfinity, most = kInfinity | 0x8000'8000u;

  template <int kCount>
  __device__ void add(const Neighbours<T, kCount>& strip) {
    Two &low = reinterpret_cast<Two&>(least), &high = reinterpret_cast<Two&>(most);
#pragma unroll
    for (int i = 0; i < strip.kWords; ++i) {
      const Two two = reinterpret_cast<const Two&>(strip.words[i]);
      low = __hmin2(low, two), high = __hmax2(high, two);
    }
  }
  __device__ float2 numbers() const {
    return {fminf(low_number(least, T{}), high_number(least, T{})),
            fmaxf(low_number(most, T{}), high_number(most, T{}))};
  }
};

// A strip, and anything beyond its width.
template <int kRoom, Staging kStaging, typename T>
__device__ inline Neighbours<T, kRoom> load_strip(const T* from, const PoolTask& task) {
  Neighbours<T, kRoom> strip;
  if constexpr (kStaging == Staging::kVectors) {
    strip.load(from);
  } else if (kStaging == Staging::kFlat && task.pairs) {
#pragma unroll
    for (int j = 0; j < kRoom; j += 2) {
      Neighbours<T, 2> pair;
      pair.load(from + j);
#pragma unroll
      for (int i = 0; i < pair.kWords; ++i) strip.words[j / 2 * pair.kWords + i] = pair.words[i];
    }
  } else if constexpr (kStaging == Staging::kSquares) {
#pragma unroll
    for (int j = 0; j < kRoom; ++j) strip.items[j] = from[j * square_run(kRoom)];
  } else {
    const int stride = is_flat(kStaging) ? 1 : task.run;
#pragma unroll
    for (int j = 0; j < kRoom; ++j, from += stride) strip.items[j] = *from;
  }
  return strip;
}

// The inverse; writes nothing beyond the width.
template <int kRoom, Staging kStaging, typename T>
__device__ inline void store_strip(T* to, const PoolTask& task, int width,
                                   const Neighbours<T, kRoom>& strip) {
  if constexpr (kStaging == Staging::kVectors) {
    strip.store(to);
  } else if (kStaging == Staging::kFlat && task.pairs) {
#pragma unroll
    for (int j = 0; j < kRoom; j += 2) {
      Neighbours<T, 2> pair;
#pragma unroll
      for (int i = 0; i < pair.kWords; ++i) pair.words[i] = strip.words[j / 2 * pair.kWords + i];
      if (j < width) pair.store(to + j);
    }
  } else if constexpr (kStaging == Staging::kSquares) {
#pragma unroll
    for (int j = 0; j < kRoom; ++j) to[j * square_run(kRoom)] = strip.items[j];
  } else {
    const int stride = is_flat(kStaging) ? 1 : task.run;
#pragma unroll
    for (int j = 0; j < kRoom; ++j, to += stride)
      if (j < width) *to = strip.items[j];
  }
}

}  // namespace backfold::cuda

#endif  // BACKFOLD_POOL_CUDA_STRIP_CUH_
