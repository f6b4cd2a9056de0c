// SPDX-License-Identifier: Apache-2.0
//
// The bounds of channels (ranged.h's widen()). Minima and maxima do not depend on order, so threads
// join theirs by atomics on the numbers' bits.

#include <type_traits>

#include "base/cuda/elements.cuh"
#include "base/cuda/launch.h"
#include "ranged/arithmetic.h"
#include "ranged/cuda/ranged.h"
#include "ranged/cuda/shape.cuh"

namespace backfold::cuda {
namespace {

using core::Bounds;

constexpr int kThreads = 256;
constexpr int kSteps = 4;   // vectors of one lane that are in flight
constexpr int kRounds = 4;  // times in a tile

// A thread joins two bounds for each element of a vector, so there are fewer of them than a large
// GPU holds, with more to do: at 8 vectors each, 1,024 channels took 73 us where one took 22 (bf16,
// cuda_bench 24 ranged, H200).
constexpr std::int64_t kMostThreads = 1 << 17;
constexpr std::int64_t kLeastVectors = 64;

template <typename T>
constexpr int kTile = kRounds* kSteps * 32 * kVector<T>;  // elements of one warp

__device__ std::int64_t thread_index() {
  return static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
}

__device__ inline Bounds no_bounds() {
  return {core::float_of(0x7f80'0000u), core::float_of(0xff80'0000u)};
}

// Minima and maxima take -0 for less than +0, and leave a NaN out: 0 * value + value is NaN where
// value is not finite, else value.
__device__ inline void include(float value, Bounds* bounds) {
  const float number = __fmaf_rn(value, 0.0f, value);
  bounds->low = fminf(bounds->low, number);
  bounds->high = fmaxf(bounds->high, number);
}

__device__ inline void include_bounds(const Bounds& other, Bounds* bounds) {
  bounds->low = fminf(bounds->low, other.low);
  bounds->high = fmaxf(bounds->high, other.high);
}

template <typename T>
struct PairOf;
template <>
struct PairOf<Half> {
  using type = __half2;
};
template <>
struct PairOf<BFloat> {
  using type = __nv_bfloat162;
};

// The bounds of each element of the vectors of a thread. Those of 16 bits are kept in pairs, which
// takes 3 instructions for two elements in place of 8.
template <typename T, bool kPairs = sizeof(T) == 2>
struct VectorBounds {
  Bounds bounds[kVector<T>];

  __device__ VectorBounds() {
#pragma unroll
    for (int j = 0; j < kVector<T>; ++j) bounds[j] = no_bounds();
  }
  __device__ void include_vector(const uint4& raw) {
    float values[kVector<T>];
    to_floats<T>(raw, values);
#pragma unroll
    for (int j = 0; j < kVector<T>; ++j) include(values[j], &bounds[j]);
  }
  __device__ Bounds at(int j) const { return bounds[j]; }
};

template <typename T>
struct VectorBounds<T, true> {
  using Pair = typename PairOf<T>::type;
  Pair low[4], high[4];

  __device__ VectorBounds() {
    constexpr std::uint32_t kInfinities = std::is_same_v<T, Half> ? 0x7c00'7c00u : 0x7f80'7f80u;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      low[i] = pair_of(kInfinities);
      high[i] = pair_of(kInfinities | 0x8000'8000u);
    }
  }
  __device__ static Pair pair_of(std::uint32_t word) {
    return *reinterpret_cast<const Pair*>(&word);
  }
  __device__ void include_vector(const uint4& raw) {
    const std::uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Pair pair = pair_of(words[i]), number = __hfma2(pair, pair_of(0), pair);
      low[i] = __hmin2(low[i], number);
      high[i] = __hmax2(high[i], number);
    }
  }
  __device__ Bounds at(int j) const {
    return j % 2 == 0 ? Bounds{__low2float(low[j / 2]), __low2float(high[j / 2])}
                      : Bounds{__high2float(low[j / 2]), __high2float(high[j / 2])};
  }
};

// Joins bounds to those of a channel. Bounds only move outward, so a stale one that is wide enough
// saves the atomic: all but a few hundred of them for a tensor of one channel. Numbers without a
// sign bit order like signed integers, the others like unsigned ones, backwards.
__device__ inline void join(const Bounds& bounds, Bounds* channel) {
  if (core::is_below(bounds.low, __ldcg(&channel->low))) {
    const std::uint32_t bits = core::bits_of(bounds.low);
    if (bits >> 31 == 0)
      atomicMin(reinterpret_cast<int*>(&channel->low), static_cast<int>(bits));
    else
      atomicMax(reinterpret_cast<unsigned*>(&channel->low), bits);
  }
  if (core::is_below(__ldcg(&channel->high), bounds.high)) {
    const std::uint32_t bits = core::bits_of(bounds.high);
    if (bits >> 31 == 0)
      atomicMax(reinterpret_cast<int*>(&channel->high), static_cast<int>(bits));
    else
      atomicMin(reinterpret_cast<unsigned*>(&channel->high), bits);
  }
}

// Mapping    one channel per thread
// Launch     blocks of 256, a grid as large as the work
// Alignment  that of the ranges
// Bytes      ranges once, bounds once
__global__ void start_kernel(const float* ranges, std::int64_t channels, Bounds* bounds) {
  const std::int64_t channel = thread_index();
  if (channel < channels)
    bounds[channel] = core::bounds_of(ranges[2 * channel], ranges[2 * channel + 1]);
}

template <typename T>
__device__ __noinline__ void join_vector(const Shape& shape, const T* source, std::int64_t vector,
                                         Bounds* bounds) {
  constexpr int E = kVector<T>;
  const std::int64_t left = shape.count - vector * E;
  if (left <= 0) return;
  walk<E>(shape, vector * E, [&](int j, std::int64_t channel) {
    if (j >= left) return;
    Bounds found = no_bounds();
    include(core::to_float(source[vector * E + j]), &found);
    join(found, bounds + channel);
  });
}

// Mapping    a warp reads 16 vectors per lane, 4 in flight, and joins what it found once. Tiles
//            that reach over a run's end join element by element
// Launch     blocks of 256, a grid as large as the work
// Alignment  16-byte loads when the source allows and in whole tiles, else by element
// Bytes      source once
template <typename T>
__global__ void __launch_bounds__(kThreads)
    widen_tiles(const __grid_constant__ Shape shape, const T* __restrict__ source,
                const bool aligned, Bounds* bounds) {
  constexpr int E = kVector<T>;
  const int lane = threadIdx.x % 32;
  const std::int64_t start = thread_index() / 32 * (32 * kSteps * kRounds);
  if (start * E >= shape.count) return;
  const Position at = position_of(shape, start * E);
  if (!aligned || start * E + kTile < T >> shape.count || at.left < kTile<T>) {
    for (int step = 0; step < kSteps * kRounds; ++step)
      join_vector<T>(shape, source, start + step * 32 + lane, bounds);
    return;
  }
  VectorBounds<T> each;
  for (int round = 0; round < kRounds; ++round) {
    uint4 raw[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      raw[step] =
          reinterpret_cast<const uint4*>(source)[start + (round * kSteps + step) * 32 + lane];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) each.include_vector(raw[step]);
  }
  Bounds found = no_bounds();
#pragma unroll
  for (int j = 0; j < E; ++j) include_bounds(each.at(j), &found);
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2)
    include_bounds({__shfl_xor_sync(0xffff'ffffu, found.low, apart),
                    __shfl_xor_sync(0xffff'ffffu, found.high, apart)},
                   &found);
  if (lane == 0) join(found, bounds + at.channel);
}

// Mapping    a thread reads every `period`-th vector, 4 in flight, with bounds in registers
// Launch     blocks of 256 for `period` threads
// Alignment  the source starts on 16 bytes
// Bytes      source once
template <typename T>
__global__ void __launch_bounds__(kThreads)
    widen_rows(const __grid_constant__ Shape shape, const T* __restrict__ source,
               const std::int64_t period, Bounds* bounds) {
  constexpr int E = kVector<T>;
  const std::int64_t first = thread_index();
  if (first >= period) return;
  VectorBounds<T> each;
  std::int64_t vector = first;
  for (; (vector + (kSteps - 1) * period + 1) * E <= shape.count; vector += kSteps * period) {
    uint4 raw[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      raw[step] = reinterpret_cast<const uint4*>(source)[vector + step * period];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) each.include_vector(raw[step]);
  }
  if (shape.channels == 1) {
    Bounds found = no_bounds();
#pragma unroll
    for (int j = 0; j < E; ++j) include_bounds(each.at(j), &found);
    join(found, bounds);
  } else {
    walk<E>(shape, first * E,
            [&](int j, std::int64_t channel) { join(each.at(j), bounds + channel); });
  }
  for (; vector * E < shape.count; vector += period) join_vector<T>(shape, source, vector, bounds);
}

}  // namespace

Status widen_ranges(const RangedFormat& format, const void* source, const float* ranges,
                    float* widened, void* stream) {
  if (format.channels == 0) return {};
  const auto queue = static_cast<cudaStream_t>(stream);
  Bounds* const bounds = reinterpret_cast<Bounds*>(widened);
  unsigned blocks = 0;
  Status status = blocks_for(format.channels, kThreads, &blocks);
  if (!status.ok()) return status;
  start_kernel<<<blocks, kThreads, 0, queue>>>(ranges, format.channels, bounds);
  status = check_launch("widen start");
  core::with_element(format.type, [&]<typename T>() {
    const Shape shape(format);
    if (!status.ok() || shape.count == 0) return;
    const T* const elements = static_cast<const T*>(source);
    const bool aligned = is_aligned(source, 16);
    const std::int64_t period =
        aligned ? period_of(shape, kVector<T>, kTile<T>, kMostThreads, kLeastVectors) : 0;
    status = blocks_for(period != 0 ? period : shape.count,
                        period != 0 ? kThreads : kThreads / 32 * kTile<T>, &blocks);
    if (!status.ok()) return;
    if (period != 0)
      widen_rows<T><<<blocks, kThreads, 0, queue>>>(shape, elements, period, bounds);
    else
      widen_tiles<T><<<blocks, kThreads, 0, queue>>>(shape, elements, aligned, bounds);
    status = check_launch("widen");
  });
  return status;
}

}  // namespace backfold::cuda
