// SPDX-License-Identifier: Apache-2.0

#include "lossless/cuda/narrow.h"

#include <cstring>
#include <type_traits>

#include "base/checks.h"
#include "base/cuda/launch.h"
#include "base/cuda/witness.h"

namespace backfold::cuda {
namespace {

using core::NarrowCode;

constexpr int kThreads = 256;
constexpr int kSteps = 4;  // vectors of one lane

// Elements of one 16-byte vector, and of one warp.
template <typename Element>
constexpr int kPerVector = 16 / static_cast<int>(sizeof(Element));
template <typename Element>
constexpr int kTile = kSteps * 32 * kPerVector<Element>;

// Neighbouring elements or codes that one instruction moves.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Vector {
  T items[kCount];
};

template <typename Element>
__device__ std::int64_t first_of_warp() {
  return (static_cast<std::int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32) *
         kTile<Element>;
}

// Mapping    a lane turns 16 bytes of elements into 2, 4 or 8 of codes, 4 times; a load of a warp
//            covers 512 contiguous bytes, a store 64 to 256
// Launch     blocks of 256, a grid as large as the work
// Alignment  16-byte loads when the source allows and in whole tiles, else by element
// Bytes      source once, codes once, padding included
template <typename Element, typename Code>
__global__ void __launch_bounds__(kThreads)
    encode_kernel(const NarrowCode code, const Element* __restrict__ source,
                  const std::int64_t count, const std::int64_t padded_count, const bool aligned,
                  Code* __restrict__ codes) {
  constexpr int E = kPerVector<Element>;
  const int lane = threadIdx.x % 32;
  const std::int64_t first = first_of_warp<Element>();
  if (first >= padded_count) return;

  if (aligned && first + kTile<Element> <= count) {
    const auto* from = reinterpret_cast<const Vector<Element, E>*>(source + first) + lane;
    auto* to = reinterpret_cast<Vector<Code, E>*>(codes + first) + lane;
    Vector<Element, E> elements[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) elements[step] = from[step * 32];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      Vector<Code, E> packed;
#pragma unroll
      for (int j = 0; j < E; ++j)
        packed.items[j] = core::encode<Code>(code, elements[step].items[j]);
      to[step * 32] = packed;
    }
    return;
  }
  for (int i = lane; i < kTile<Element>; i += 32) {
    const std::int64_t index = first + i;
    if (index >= padded_count) break;
    codes[index] = index < count ? core::encode<Code>(code, source[index]) : Code{0};
  }
}

// Mapping    the inverse of encode_kernel
// Launch     blocks of 256, a grid as large as the work
// Alignment  16-byte stores when the destination allows and in whole tiles, else by element
// Bytes      codes once, elements once
template <typename Element, typename Code>
__global__ void __launch_bounds__(kThreads)
    decode_kernel(const NarrowCode code, const Code* __restrict__ codes, const std::int64_t count,
                  const bool aligned, Element* __restrict__ destination) {
  constexpr int E = kPerVector<Element>;
  const int lane = threadIdx.x % 32;
  const std::int64_t first = first_of_warp<Element>();
  if (first >= count) return;

  if (aligned && first + kTile<Element> <= count) {
    const auto* from = reinterpret_cast<const Vector<Code, E>*>(codes + first) + lane;
    auto* to = reinterpret_cast<Vector<Element, E>*>(destination + first) + lane;
    Vector<Code, E> packed[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) packed[step] = from[step * 32];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      Vector<Element, E> elements;
#pragma unroll
      for (int j = 0; j < E; ++j)
        elements.items[j] = core::decode<Element>(code, packed[step].items[j]);
      to[step * 32] = elements;
    }
    return;
  }
  for (int i = lane; i < kTile<Element>; i += 32) {
    const std::int64_t index = first + i;
    if (index >= count) break;
    destination[index] = core::decode<Element>(code, codes[index]);
  }
}

// Mapping    one element per thread
// Launch     blocks of 256, a grid as large as the work
// Alignment  that of the elements
// Bytes      source once; debug builds only
template <typename Element>
__global__ void bound_kernel(const NarrowCode code, const Element* source, std::int64_t count,
                             Witness* witness) {
  const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index < count && !core::keeps_bound(code, source[index])) testify(witness, index);
}

// Elements whose codes fill the payload.
std::int64_t padded_count(std::int64_t count, int code_bytes) {
  return static_cast<std::int64_t>(
             core::padded(static_cast<std::size_t>(count) * static_cast<std::size_t>(code_bytes))) /
         code_bytes;
}

}  // namespace

Status encode(const NarrowCode& code, std::size_t element_bytes, const void* source,
              std::int64_t count, void* codes, void* stream) {
  if (count == 0) return {};
  Status status;
  core::with_narrow_types(element_bytes, code.code_bytes, [&]<typename Element, typename Code>() {
    const std::int64_t padded = padded_count(count, code.code_bytes);
    unsigned blocks = 0;
    status = blocks_for(padded, kThreads / 32 * kTile<Element>, &blocks);
    if (!status.ok()) return;
    encode_kernel<Element, Code><<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        code, static_cast<const Element*>(source), count, padded, is_aligned(source, 16),
        static_cast<Code*>(codes));
    status = check_launch("encode");
  });
  return status;
}

Status decode(const NarrowCode& code, std::size_t element_bytes, const void* codes,
              std::int64_t count, void* destination, void* stream) {
  if (count == 0) return {};
  Status status;
  core::with_narrow_types(element_bytes, code.code_bytes, [&]<typename Element, typename Code>() {
    unsigned blocks = 0;
    status = blocks_for(count, kThreads / 32 * kTile<Element>, &blocks);
    if (!status.ok()) return;
    decode_kernel<Element, Code><<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        code, static_cast<const Code*>(codes), count, is_aligned(destination, 16),
        static_cast<Element*>(destination));
    status = check_launch("decode");
  });
  return status;
}

Status find_broken_bound(const NarrowCode& code, std::size_t element_bytes, const void* source,
                         std::int64_t count, void* stream, std::int64_t* index,
                         std::int64_t* value) {
  const auto queue = static_cast<cudaStream_t>(stream);
  Status status;
  core::with_narrow_types(element_bytes, code.code_bytes, [&]<typename Element, typename Code>() {
    const Element* elements = static_cast<const Element*>(source);
    unsigned blocks = 0;
    status = blocks_for(count, kThreads, &blocks);
    if (!status.ok()) return;
    Witness found;
    status = hear_witness(queue, &found, [&](Witness* witness) {
      bound_kernel<<<blocks, kThreads, 0, queue>>>(code, elements, count, witness);
    });
    *index = found.index;
    if (!status.ok() || found.index < 0) return;
    std::make_signed_t<Element> element = 0;
    status = check(cudaMemcpyAsync(&element, elements + found.index, sizeof(element),
                                   cudaMemcpyDeviceToHost, queue),
                   "cudaMemcpyAsync");
    if (status.ok()) status = check(cudaStreamSynchronize(queue), "cudaStreamSynchronize");
    *value = element;
  });
  return status;
}

}  // namespace backfold::cuda
