// SPDX-License-Identifier: Apache-2.0

#include "lossless/cuda/bits.h"

#include "base/checks.h"
#include "base/cuda/launch.h"
#include "base/cuda/witness.h"

namespace backfold::cuda {
namespace {

using core::BitTest;
using core::BitValues;

constexpr int kThreads = 256;
constexpr int kTile = 1'024;  // elements of one warp: 32 words of bits, a full 128-byte line
constexpr int kBlockElements = kThreads / 32 * kTile;

// A lane moves 16 bytes at a time: kPerVector elements, kVectors times. kPerVector * kVectors
// is 32.
template <typename U>
constexpr int kPerVector = 16 / static_cast<int>(sizeof(U));
template <typename U>
constexpr int kVectors = 32 / kPerVector<U>;

// Smaller elements are tested in the upper bits of a 32-bit word, where they need no masking: what
// is below them does not change the answer.
template <typename U>
struct Widened {
  using Word = std::uint32_t;
  static constexpr int kShift = 32 - 8 * static_cast<int>(sizeof(U));
};
template <>
struct Widened<std::uint64_t> {
  using Word = std::uint64_t;
  static constexpr int kShift = 0;
};

template <typename U>
BitTest widened(BitTest test) {
  constexpr int kShift = Widened<U>::kShift;
  constexpr std::uint64_t kBelow = (std::uint64_t{1} << kShift) - 1;
  test.low <<= kShift;
  test.span = test.span << kShift | kBelow;
  test.hole_low <<= kShift;
  test.hole_span = test.hole_span << kShift | kBelow;
  return test;
}

// Element j of 16 loaded bytes, in the upper bits of its word.
template <typename U>
__device__ typename Widened<U>::Word element(const uint4& vector, int j) {
  if constexpr (sizeof(U) == 8) {
    return j == 0 ? vector.x | static_cast<std::uint64_t>(vector.y) << 32
                  : vector.z | static_cast<std::uint64_t>(vector.w) << 32;
  } else {
    constexpr int kPerWord = 4 / static_cast<int>(sizeof(U));
    const unsigned words[4] = {vector.x, vector.y, vector.z, vector.w};
    return words[j / kPerWord] << (32 - 8 * static_cast<int>(sizeof(U)) * (j % kPerWord + 1));
  }
}

// A lane holds kVectors items of kPerVector bits, item v from its vector v. The kVectors lanes
// beside each other exchange them, so that lane r ends with the items that all of them made of
// vector r.
template <typename U>
__device__ std::uint32_t transposed(std::uint32_t items, int lane) {
#pragma unroll
  for (int step = kVectors<U> / 2; step >= 1; step /= 2) {
    const int width = step * kPerVector<U>;
    const std::uint32_t upper = (0xffff'ffffu / ((1u << width) + 1u)) << width;
    const std::uint32_t other = __shfl_xor_sync(kFullWarp, items, step);
    items = (lane & step) != 0 ? (items & upper) | (other & upper) >> width
                               : (items & ~upper) | (other & ~upper) << width;
  }
  return items;
}

// Keeps an element whose bit is set. All such elements are equal, so it does not matter which
// lane's is kept; the look before the store, through L1, spares the one address a store from every
// warp.
template <typename U>
__device__ void keep_value(const U* source, std::int64_t index, void* prefix) {
  if (__ldca(static_cast<const unsigned long long*>(prefix)) != 0) return;
  *static_cast<U*>(prefix) = source[index];
}

// Mapping    a warp makes 32 words of 1,024 elements: a lane tests 32, in 16-byte vectors that lie
//            512 bytes apart, and exchanges bits with its 1, 3, 7 or 15 neighbours by shuffles
// Launch     blocks of 256, a grid as large as the work
// Alignment  16-byte loads when the source allows and in whole tiles, else by element
// Bytes      source once, bits once in full lines; a mask's prefix about once per multiprocessor
template <typename U, bool kHole>
__global__ void __launch_bounds__(kThreads)
    pack_kernel(const BitTest test, const U* __restrict__ source, const std::int64_t count,
                const bool aligned, std::uint32_t* __restrict__ bits, void* const prefix) {
  using Word = typename Widened<U>::Word;
  constexpr int E = kPerVector<U>;
  constexpr int V = kVectors<U>;
  const int lane = threadIdx.x % 32;
  const std::int64_t first =
      (static_cast<std::int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32) * kTile;
  if (first >= count) return;

  std::uint32_t items = 0;
  if (aligned && first + kTile <= count) {
    const uint4* vectors = reinterpret_cast<const uint4*>(source + first) + lane;
    uint4 loaded[V];
#pragma unroll
    for (int v = 0; v < V; ++v) loaded[v] = vectors[v * 32];
#pragma unroll
    for (int v = 0; v < V; ++v)
#pragma unroll
      for (int j = 0; j < E; ++j)
        if (core::in_range<kHole>(test, core::order_key(element<U>(loaded[v], j))))
          items |= 1u << (v * E + j);
    if (test.invert) items = ~items;
  } else {
#pragma unroll 1
    for (int v = 0; v < V; ++v)
      for (int j = 0; j < E; ++j) {
        const std::int64_t index = first + (v * 32 + lane) * E + j;
        if (index >= count) break;
        const Word word = static_cast<Word>(source[index]) << Widened<U>::kShift;
        if (core::in_range<kHole>(test, core::order_key(word)) != test.invert)
          items |= 1u << (v * E + j);
      }
  }

  if (prefix != nullptr && items != 0) {
    const int item = __ffs(static_cast<int>(items)) - 1;
    keep_value(source, first + (item / E * 32 + lane) * E + item % E, prefix);
  }
  const std::uint32_t word = transposed<U>(items, lane);
  const std::int64_t index = first / 32 + lane % V * E + lane / V;
  if (index < (count + core::kBitBlock - 1) / core::kBitBlock * (core::kBitBlock / 32))
    bits[index] = word;
}

// Mapping    the inverse of pack_kernel: a lane reads one word, and shuffles bring what it needs
// Launch     blocks of 256, a grid as large as the work
// Alignment  16-byte stores when the destination allows and in whole tiles, else by element
// Bytes      bits once, elements once in full lines
template <typename U>
__global__ void __launch_bounds__(kThreads)
    unpack_kernel(const BitValues values, const std::uint32_t* __restrict__ bits,
                  const std::int64_t count, const bool aligned, U* __restrict__ destination,
                  const U* __restrict__ prefix) {
  struct alignas(16) Vector {
    U elements[kPerVector<U>];
  };
  constexpr int E = kPerVector<U>;
  constexpr int V = kVectors<U>;
  const int lane = threadIdx.x % 32;
  const std::int64_t first =
      (static_cast<std::int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32) * kTile;
  if (first >= count) return;
  const U if_true = prefix != nullptr ? *prefix : static_cast<U>(values.if_true);
  const U if_false = static_cast<U>(values.if_false);
  const std::int64_t words = (count + 31) / 32;
  const std::uint32_t word = first / 32 + lane < words ? bits[first / 32 + lane] : 0;
  const auto items_of = [word, lane](int v) {
    return __shfl_sync(kFullWarp, word, v * E + lane / V) >> (lane % V * E);
  };

  if (aligned && first + kTile <= count) {
    Vector* vectors = reinterpret_cast<Vector*>(destination + first) + lane;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const std::uint32_t items = items_of(v);
      Vector vector;
#pragma unroll
      for (int j = 0; j < E; ++j) vector.elements[j] = (items >> j & 1) != 0 ? if_true : if_false;
      vectors[v * 32] = vector;
    }
    return;
  }
#pragma unroll 1
  for (int v = 0; v < V; ++v) {
    const std::uint32_t items = items_of(v);
    for (int j = 0; j < E; ++j) {
      const std::int64_t index = first + (v * 32 + lane) * E + j;
      if (index < count) destination[index] = (items >> j & 1) != 0 ? if_true : if_false;
    }
  }
}

template <typename U>
Status pack_as(const BitTest& test, const void* source, std::int64_t count, void* bits,
               void* prefix, cudaStream_t stream) {
  unsigned blocks = 0;
  BACKFOLD_RETURN_IF_ERROR(blocks_for(count, kBlockElements, &blocks));
  const auto kernel = test.has_hole ? pack_kernel<U, true> : pack_kernel<U, false>;
  kernel<<<blocks, kThreads, 0, stream>>>(widened<U>(test), static_cast<const U*>(source), count,
                                          is_aligned(source, 16), static_cast<std::uint32_t*>(bits),
                                          prefix);
  return check_launch("pack_bits");
}

template <typename U>
Status unpack_as(const BitValues& values, const void* bits, std::int64_t count, void* destination,
                 const void* prefix, cudaStream_t stream) {
  unsigned blocks = 0;
  BACKFOLD_RETURN_IF_ERROR(blocks_for(count, kBlockElements, &blocks));
  unpack_kernel<U><<<blocks, kThreads, 0, stream>>>(
      values, static_cast<const std::uint32_t*>(bits), count, is_aligned(destination, 16),
      static_cast<U*>(destination), static_cast<const U*>(prefix));
  return check_launch("unpack_bits");
}

// Mapping    one element per thread; first a pass that picks a value, then one that compares
// Launch     blocks of 256, a grid as large as the work
// Alignment  that of the elements
// Bytes      source twice; debug builds only
template <typename U>
__global__ void pick_kernel(const U* source, std::int64_t count, Witness* witness) {
  const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index < count && source[index] != 0) witness->element = source[index];
}
template <typename U>
__global__ void compare_kernel(const U* source, std::int64_t count, Witness* witness) {
  constexpr U kNegativeZero = static_cast<U>(U{1} << (8 * sizeof(U) - 1));
  const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= count || source[index] == 0) return;
  if (source[index] == kNegativeZero || source[index] != static_cast<U>(witness->element))
    testify(witness, index);
}

template <typename U>
Status find_odd_one_as(const void* source, std::int64_t count, cudaStream_t stream,
                       std::int64_t* odd_one) {
  unsigned blocks = 0;
  BACKFOLD_RETURN_IF_ERROR(blocks_for(count, kThreads, &blocks));
  Witness found;
  BACKFOLD_RETURN_IF_ERROR(hear_witness(stream, &found, [&](Witness* witness) {
    const U* elements = static_cast<const U*>(source);
    pick_kernel<<<blocks, kThreads, 0, stream>>>(elements, count, witness);
    compare_kernel<<<blocks, kThreads, 0, stream>>>(elements, count, witness);
  }));
  *odd_one = found.index;
  return {};
}

}  // namespace

Status pack_bits(const BitTest& test, std::size_t element_bytes, const void* source,
                 std::int64_t count, void* bits, void* prefix, void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  if (prefix != nullptr)
    BACKFOLD_RETURN_IF_ERROR(check(cudaMemsetAsync(prefix, 0, 16, queue), "cudaMemsetAsync"));
  if (count == 0) return {};
  switch (element_bytes) {
    case 1:
      return pack_as<std::uint8_t>(test, source, count, bits, prefix, queue);
    case 2:
      return pack_as<std::uint16_t>(test, source, count, bits, prefix, queue);
    case 4:
      return pack_as<std::uint32_t>(test, source, count, bits, prefix, queue);
    default:
      return pack_as<std::uint64_t>(test, source, count, bits, prefix, queue);
  }
}

Status unpack_bits(const BitValues& values, std::size_t element_bytes, const void* bits,
                   std::int64_t count, void* destination, const void* prefix, void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  if (count == 0) return {};
  switch (element_bytes) {
    case 1:
      return unpack_as<std::uint8_t>(values, bits, count, destination, prefix, queue);
    case 2:
      return unpack_as<std::uint16_t>(values, bits, count, destination, prefix, queue);
    case 4:
      return unpack_as<std::uint32_t>(values, bits, count, destination, prefix, queue);
    default:
      return unpack_as<std::uint64_t>(values, bits, count, destination, prefix, queue);
  }
}

Status find_odd_one(std::size_t element_bytes, const void* source, std::int64_t count, void* stream,
                    std::int64_t* odd_one) {
  const auto queue = static_cast<cudaStream_t>(stream);
  switch (element_bytes) {
    case 2:
      return find_odd_one_as<std::uint16_t>(source, count, queue, odd_one);
    case 4:
      return find_odd_one_as<std::uint32_t>(source, count, queue, odd_one);
    default:
      return find_odd_one_as<std::uint64_t>(source, count, queue, odd_one);
  }
}

}  // namespace backfold::cuda
