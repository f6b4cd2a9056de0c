// SPDX-License-Identifier: Apache-2.0

#include "table/cuda/table.h"

#include <type_traits>

#include "base/cuda/code_pieces.cuh"
#include "base/cuda/elements.cuh"
#include "base/cuda/launch.h"
#include "base/widths.h"

namespace backfold::cuda {
namespace {

using core::TableCode;

constexpr int kThreads = 256;
constexpr int kSteps = 4;  // vectors of one lane

template <typename T>
constexpr int kTile = kSteps * 32 * kVector<T>;  // elements of one warp

template <typename T>
__device__ std::int64_t first_vector_of_warp() {
  return (static_cast<std::int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32) * kSteps * 32;
}

// A table for packing. Elements of 16 bits are compared two at a time in their own type, with each
// bound rounded up to it, which changes no comparison.
struct PackTable {
  float bounds[15];
  std::uint32_t pairs[15];
};

// The number of bounds <= value, by bisection. The first two comparisons are with bounds in
// constant memory; the others look theirs up in shared memory, where the 16 of them stand in 16
// banks, so that no two lanes conflict.
template <int kBits>
__device__ std::uint32_t bisect(float value, const PackTable& table, const float* bounds) {
  constexpr int kHalf = 1 << (kBits - 1);
  const bool upper = value >= table.bounds[kHalf - 1];
  std::uint32_t code = upper ? kHalf : 0;
  if constexpr (kBits >= 2) {
    const float middle = upper ? table.bounds[kHalf + kHalf / 2 - 1] : table.bounds[kHalf / 2 - 1];
    code += value >= middle ? kHalf / 2 : 0;
  }
#pragma unroll
  for (int half = kHalf / 4; half > 0; half /= 2)
    code += value >= bounds[code + half - 1] ? half : 0;
  return code;
}

__device__ inline std::uint32_t not_below(std::uint32_t a, std::uint32_t b, Half) {
  return __hge2_mask(*reinterpret_cast<const __half2*>(&a), *reinterpret_cast<const __half2*>(&b));
}
__device__ inline std::uint32_t not_below(std::uint32_t a, std::uint32_t b, BFloat) {
  return __hge2_mask(*reinterpret_cast<const __nv_bfloat162*>(&a),
                     *reinterpret_cast<const __nv_bfloat162*>(&b));
}

// The bound of a level of the bisection, for two elements: masks[0] to masks[kLevel - 1] say which
// way they went. A choice is one instruction for both.
template <int kBits, int kLevel, int kFrom = 0, int kCode = 0>
__device__ inline std::uint32_t bound_at(const PackTable& table, const std::uint32_t* masks) {
  if constexpr (kFrom == kLevel) {
    return table.pairs[kCode + (1 << (kBits - 1 - kLevel)) - 1];
  } else {
    const std::uint32_t below = bound_at<kBits, kLevel, kFrom + 1, kCode>(table, masks);
    const std::uint32_t above =
        bound_at<kBits, kLevel, kFrom + 1, kCode + (1 << (kBits - 1 - kFrom))>(table, masks);
    return (masks[kFrom] & above) | (~masks[kFrom] & below);
  }
}

// The codes of two elements, in the halves of a word.
template <typename T, int kBits, int kLevel = 0>
__device__ inline std::uint32_t bisect_pair(std::uint32_t pair, const PackTable& table,
                                            std::uint32_t* masks) {
  if constexpr (kLevel == kBits) {
    return 0;
  } else {
    masks[kLevel] = not_below(pair, bound_at<kBits, kLevel>(table, masks), T{});
    return bisect_pair<T, kBits, kLevel + 1>(pair, table, masks) |
           (masks[kLevel] & 0x0001'0001u << (kBits - 1 - kLevel));
  }
}

template <typename T, int kBits>
__device__ inline void codes_of(const uint4& raw, const PackTable& table, const float* bounds,
                                std::uint32_t (&codes)[kVector<T>]) {
  if constexpr (sizeof(T) == 2) {
    const std::uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      std::uint32_t masks[kBits];
      const std::uint32_t pair = bisect_pair<T, kBits>(words[i], table, masks);
      codes[2 * i] = pair & 0xffffu;
      codes[2 * i + 1] = pair >> 16;
    }
  } else {
    float values[kVector<T>];
    to_floats<T>(raw, values);
#pragma unroll
    for (int j = 0; j < kVector<T>; ++j) codes[j] = bisect<kBits>(values[j], table, bounds);
  }
}

// The planes of a payload, and how many vectors each has room for, padding included.
struct Planes {
  std::uint8_t* low;
  std::uint8_t* high;
  std::int64_t low_vectors;
  std::int64_t high_vectors;
};

// Mapping    a lane turns 16 bytes of elements into their codes, 4 times; a load of a warp covers
//            512 contiguous bytes
// Launch     blocks of 256, a grid as large as the work
// Alignment  16-byte loads when the source allows and in whole tiles, else by element
// Bytes      source once, codes once, padding included
//
// Without __grid_constant__ a table that is indexed moves to local memory (0.38 of a copy for fp32
// in cuda_bench 28 table, H200).
template <typename T, int kBits>
__global__ void __launch_bounds__(kThreads)
    pack_kernel(const __grid_constant__ PackTable table, const T* __restrict__ source,
                const std::int64_t count, const bool aligned, const Planes planes) {
  constexpr int E = kVector<T>;
  __shared__ float bounds[16];
  if (threadIdx.x < 16) bounds[threadIdx.x] = threadIdx.x < 15 ? table.bounds[threadIdx.x] : 0.0f;
  __syncthreads();
  const std::int64_t first = first_vector_of_warp<T>();
  const std::int64_t most = kBits == 3 && planes.high_vectors > planes.low_vectors
                                ? planes.high_vectors
                                : planes.low_vectors;
  if (first >= most) return;
  const int lane = threadIdx.x % 32;

  const bool whole = aligned && first * E + kTile<T> <= count;
  uint4 raw[kSteps];
  if (whole) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      raw[step] = reinterpret_cast<const uint4*>(source)[first + step * 32 + lane];
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const std::int64_t vector = first + step * 32 + lane;
    int there = E;
    if (!whole) {
      const std::int64_t left = count - vector * E;
      there = left < 0 ? 0 : left < E ? static_cast<int>(left) : E;
      raw[step] = load_elements<T>(source + vector * E, there);
    }
    std::uint32_t codes[E];
    codes_of<T, kBits>(raw[step], table, bounds, codes);
    Piece<kBits == 3 ? 2 : kBits, E> low;
    Piece<1, E> high;
    low.start(), high.start();
#pragma unroll
    for (int j = 0; j < E; ++j) {
      const std::uint32_t code = whole || j < there ? codes[j] : 0u;
      low.add(j, kBits == 3 ? code & 3u : code);
      if constexpr (kBits == 3) high.add(j, code >> 2);
    }
    low.store(planes.low, vector, vector < planes.low_vectors);
    if constexpr (kBits == 3) high.store(planes.high, vector, vector < planes.high_vectors);
  }
}

// Lanes of 16 bits share a word with their neighbour, the others fill one or two.
template <typename T>
using Entry = std::conditional_t<sizeof(T) == 8, std::uint64_t, std::uint32_t>;

template <typename T>
__device__ uint4 join_entries(const Entry<T> (&entries)[kVector<T>]) {
  std::uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 2)
      words[i] = entries[2 * i] | entries[2 * i + 1] << 16;
    else if constexpr (sizeof(T) == 4)
      words[i] = entries[i];
    else
      words[i] = static_cast<std::uint32_t>(entries[i / 2] >> 32 * (i % 2));
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Mapping    the inverse of pack_kernel; values come out of shared memory, where the 16 of them
//            stand in banks of their own
// Launch     blocks of 256, a grid as large as the work
// Alignment  16-byte stores when the destination allows and in whole tiles, else by element
// Bytes      codes once, elements once
template <typename T, int kBits>
__global__ void __launch_bounds__(kThreads)
    unpack_kernel(const __grid_constant__ TableCode table, const Planes planes,
                  const std::int64_t count, const bool aligned, T* __restrict__ destination) {
  constexpr int E = kVector<T>;
  __shared__ Entry<T> entries[16];
  if (threadIdx.x < 16) entries[threadIdx.x] = static_cast<Entry<T>>(table.values[threadIdx.x]);
  __syncthreads();
  const std::int64_t first = first_vector_of_warp<T>();
  const int lane = threadIdx.x % 32;
  const bool whole = aligned && first * E + kTile<T> <= count;

  Piece<kBits == 3 ? 2 : kBits, E> low[kSteps];
  Piece<1, E> high[kSteps];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const std::int64_t vector = first + step * 32 + lane;
    if (!whole && vector * E >= count) break;
    low[step].load(planes.low, vector);
    if constexpr (kBits == 3) high[step].load(planes.high, vector);
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const std::int64_t vector = first + step * 32 + lane;
    if (!whole && vector * E >= count) break;
    Entry<T> found[E];
#pragma unroll
    for (int j = 0; j < E; ++j) {
      std::uint32_t code = low[step].get(j);
      if constexpr (kBits == 3) code |= high[step].get(j) << 2;
      found[j] = entries[code];
    }
    const uint4 raw = join_entries<T>(found);
    if (whole) {
      __stcs(reinterpret_cast<uint4*>(destination) + vector, raw);
    } else {
      const std::int64_t left = count - vector * E;
      store_elements<T>(destination + vector * E, raw, left < E ? static_cast<int>(left) : E);
    }
  }
}

Planes planes_of(const TableCode& table, std::int64_t count, const void* payload, int per_vector) {
  const core::TablePlanes planes(table.bits, count);
  std::uint8_t* low = static_cast<std::uint8_t*>(const_cast<void*>(payload));
  const auto vectors = [&](std::size_t bytes, int width) {
    return static_cast<std::int64_t>(bytes) * 8 / width / per_vector;
  };
  return {low, low + planes.high_at, vectors(planes.high_at, planes.low),
          planes.high == 0 ? 0 : vectors(planes.bytes - planes.high_at, planes.high)};
}

// The least element that is not below `bound`, as its bits.
template <typename T>
std::uint16_t rounded_up(float bound) {
  const T element = core::from_float<T>(bound);
  if (core::to_float(element) >= bound) return element.bits;
  return static_cast<std::uint16_t>((element.bits & 0x8000u) != 0 ? element.bits - 1
                                                                  : element.bits + 1);
}

template <typename T>
PackTable pack_table_of(const TableCode& table) {
  PackTable packing{};
  for (int i = 0; i < 15; ++i) {
    packing.bounds[i] = table.bounds[i];
    if constexpr (sizeof(T) == 2) packing.pairs[i] = rounded_up<T>(table.bounds[i]) * 0x0001'0001u;
  }
  return packing;
}

// Calls work.operator()<T, bits>().
template <typename Work>
void with_types(ElementType type, int bits, const Work& work) {
  core::with_element(type, [&]<typename T>() {
    core::with_width<core::kTableWidths>(
        bits, [&]<int kBits>() { work.template operator()<T, kBits>(); });
  });
}

}  // namespace

Status pack_table(const TableCode& table, ElementType type, const void* source, std::int64_t count,
                  void* payload, void* stream) {
  if (count == 0) return {};
  Status status;
  with_types(type, table.bits, [&]<typename T, int kBits>() {
    const Planes planes = planes_of(table, count, payload, kVector<T>);
    unsigned blocks = 0;
    const std::int64_t vectors =
        planes.high_vectors > planes.low_vectors ? planes.high_vectors : planes.low_vectors;
    status = blocks_for(vectors, kThreads * kSteps, &blocks);
    if (!status.ok()) return;
    pack_kernel<T, kBits><<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        pack_table_of<T>(table), static_cast<const T*>(source), count, is_aligned(source, 16),
        planes);
    status = check_launch("pack_table");
  });
  return status;
}

Status unpack_table(const TableCode& table, ElementType type, const void* payload,
                    std::int64_t count, void* destination, void* stream) {
  if (count == 0) return {};
  Status status;
  with_types(type, table.bits, [&]<typename T, int kBits>() {
    const Planes planes = planes_of(table, count, payload, kVector<T>);
    unsigned blocks = 0;
    status = blocks_for(count, kThreads / 32 * kTile<T>, &blocks);
    if (!status.ok()) return;
    unpack_kernel<T, kBits><<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        table, planes, count, is_aligned(destination, 16), static_cast<T*>(destination));
    status = check_launch("unpack_table");
  });
  return status;
}

}  // namespace backfold::cuda
