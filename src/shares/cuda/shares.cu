// SPDX-License-Identifier: Apache-2.0

#include "shares/cuda/shares.h"

#include "base/checks.h"
#include "base/cuda/elements.cuh"
#include "base/cuda/launch.h"

namespace backfold::cuda {
namespace {

constexpr int kWarp = 32;

// Calls work(i) for the elements of a row that do not fill a vector of its memory, and
// on_vector(v, raw) for those that do. Rows of an odd length begin anywhere.
template <int kThreads, typename T, typename Work, typename OnVector>
__device__ inline void for_elements(T* row, std::int64_t length, int lane, Work work,
                                    OnVector on_vector) {
  constexpr int V = kVector<T>;
  const auto past =
      static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(row) / sizeof(T)) % V;
  const std::int64_t head = min(past ? V - past : std::int64_t{0}, length);
  const std::int64_t vectors = (length - head) / V;
  if (lane < head) work(lane);
  for (std::int64_t v = lane; v < vectors; v += kThreads)
    on_vector(reinterpret_cast<uint4*>(row + head) + v);
  for (std::int64_t i = head + vectors * V + lane; i < length; i += kThreads) work(i);
}

// The sum over all threads of a row, for all of them.
template <int kThreads>
__device__ inline float sum_of(float part) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) part += __shfl_xor_sync(kFullWarp, part, step);
  if constexpr (kThreads > kWarp) {
    __shared__ float parts[kThreads / kWarp];
    if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = part;
    __syncthreads();
    part = 0.0f;
#pragma unroll
    for (int i = 0; i < kThreads / kWarp; ++i) part += parts[i];
  }
  return part;
}

// Mapping    a warp for a short row, a block of 512 for a long one
// Launch     as many blocks as rows need
// Alignment  16-byte vectors wherever a row begins, its ends by element
// Bytes      each row read twice, the second time from the cache, and written once
template <typename T, int kThreads, int kBlock>
__global__ void __launch_bounds__(kBlock)
    restore_kernel(const std::int64_t rows, const std::int64_t length, T* __restrict__ logarithms) {
  const std::int64_t index =
      (static_cast<std::int64_t>(blockIdx.x) * kBlock + threadIdx.x) / kThreads;
  if (index >= rows) return;  // all threads of a row
  const int lane = static_cast<int>(threadIdx.x) % kThreads;
  T* const row = logarithms + index * length;

  float part = 0.0f;
  for_elements<kThreads>(
      row, length, lane, [&](std::int64_t i) { part += __expf(core::to_float(row[i])); },
      [&](const uint4* vector) {
        float values[kVector<T>];
        to_floats<T>(*vector, values);
#pragma unroll
        for (int j = 0; j < kVector<T>; ++j) part += __expf(values[j]);
      });
  const float sum = sum_of<kThreads>(part);
  if (!(sum > 0.0f) || !core::is_finite(sum)) return;

  const float excess = logf(sum);
  for_elements<kThreads>(
      row, length, lane,
      [&](std::int64_t i) { row[i] = core::from_float<T>(core::to_float(row[i]) - excess); },
      [&](uint4* vector) {
        float values[kVector<T>];
        to_floats<T>(*vector, values);
        uint4 raw;
#pragma unroll
        for (int j = 0; j < kVector<T>; ++j)  // not from_floats(): -infinity stays what it is
          reinterpret_cast<T*>(&raw)[j] = core::from_float<T>(values[j] - excess);
        *vector = raw;
      });
}

constexpr std::int64_t kShort = 1024;

template <typename T>
Status restore_as(std::int64_t rows, std::int64_t length, T* logarithms, cudaStream_t stream) {
  constexpr int kBlock = 512;
  unsigned blocks = 0;
  if (length <= kShort) {
    BACKFOLD_RETURN_IF_ERROR(blocks_for(rows, kBlock / kWarp, &blocks));
    restore_kernel<T, kWarp, kBlock><<<blocks, kBlock, 0, stream>>>(rows, length, logarithms);
  } else {
    BACKFOLD_RETURN_IF_ERROR(blocks_for(rows, 1, &blocks));
    restore_kernel<T, kBlock, kBlock><<<blocks, kBlock, 0, stream>>>(rows, length, logarithms);
  }
  return check_launch("restore_sums");
}

}  // namespace

Status restore_sums(ElementType type, std::int64_t rows, std::int64_t length, void* logarithms,
                    void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  if (rows == 0 || length == 0) return {};
  switch (type) {
    case ElementType::kF16:
      return restore_as(rows, length, static_cast<Half*>(logarithms), queue);
    case ElementType::kBF16:
      return restore_as(rows, length, static_cast<BFloat*>(logarithms), queue);
    default:
      return restore_as(rows, length, static_cast<float*>(logarithms), queue);
  }
}

}  // namespace backfold::cuda
