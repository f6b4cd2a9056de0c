// SPDX-License-Identifier: Apache-2.0

#include "signs/cuda/signs.h"

#include "base/checks.h"
#include "base/cuda/launch.h"

namespace backfold::cuda {
namespace {

using core::kSignBlock;
using core::MixedKey;

constexpr int kThreads = 256;

// Mapping    a thread writes 16 bytes; the 8 to 32 threads whose elements share a word of signs
//            hash it each for themselves
// Launch     blocks of 256, a grid as large as the work
// Alignment  16-byte stores when the destination allows and in whole vectors, else by element
// Bytes      elements once, in full lines; they stay in the cache for the product that reads them
template <typename U>
__global__ void __launch_bounds__(kThreads)
    signs_kernel(const U number, const MixedKey key, const std::int64_t count, const bool aligned,
                 U* __restrict__ destination) {
  constexpr int E = 16 / static_cast<int>(sizeof(U));
  struct alignas(16) Vector {
    U elements[E];
  };
  const std::int64_t first =
      (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) * std::int64_t{E};
  if (first >= count) return;
  const auto place = static_cast<std::uint64_t>(first);
  const auto signs =
      static_cast<std::uint32_t>(core::sign_word(key, place / kSignBlock) >> place % kSignBlock);
  Vector vector;
#pragma unroll
  for (int j = 0; j < E; ++j) vector.elements[j] = core::with_sign(number, signs >> j);
  if (aligned && first + E <= count) {
    *reinterpret_cast<Vector*>(destination + first) = vector;
    return;
  }
#pragma unroll
  for (int j = 0; j < E; ++j)
    if (first + j < count) destination[first + j] = vector.elements[j];
}

template <typename U>
Status fill_as(U number, std::int64_t count, MixedKey key, void* destination, cudaStream_t stream) {
  unsigned blocks = 0;
  BACKFOLD_RETURN_IF_ERROR(blocks_for(count, kThreads * 16 / std::int64_t{sizeof(U)}, &blocks));
  signs_kernel<<<blocks, kThreads, 0, stream>>>(number, key, count, is_aligned(destination, 16),
                                                static_cast<U*>(destination));
  return check_launch("fill_signs");
}

}  // namespace

Status fill_signs(std::uint64_t number, std::size_t element_bytes, std::int64_t count, MixedKey key,
                  void* destination, void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  if (count == 0) return {};
  switch (element_bytes) {
    case 2:
      return fill_as(static_cast<std::uint16_t>(number), count, key, destination, queue);
    case 4:
      return fill_as(static_cast<std::uint32_t>(number), count, key, destination, queue);
    default:
      return fill_as(number, count, key, destination, queue);
  }
}

}  // namespace backfold::cuda
