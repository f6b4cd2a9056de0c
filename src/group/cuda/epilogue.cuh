// SPDX-License-Identifier: Apache-2.0
//
// The stages of an epilogue for the neighbouring elements that a lane holds. Which ones there are
// is known at run time and the same for all threads: a kernel per combination would take minutes to
// compile, a branch per vector takes one instruction.

#ifndef BACKFOLD_GROUP_CUDA_EPILOGUE_CUH_
#define BACKFOLD_GROUP_CUDA_EPILOGUE_CUH_

#include <cstdint>

#include "base/cuda/elements.cuh"
#include "group/cuda/special.cuh"
#include "group/cuda/task.cuh"
#include "group/epilogue.h"

namespace backfold::cuda {

// What is done with a table's entries.
enum class TableUse { kRestore, kScale, kWeigh };

struct Table {
  RowTask rows;
  TableUse use;
  bool quads;  // runs of 1, and a vector's entries are whole and aligned float4s
};

// An epilogue as kernels want it, by value.
struct EpilogueTask {
  GroupTask packet;
  Table tables[3];  // the stages before the activation, in their order
  int table_count;
  Activation activation;
  const void* product;
  ElementType product_type;
  bool product_aligned;  // it starts on 16 bytes, and so does each of its rows, if strided
  const std::uint8_t* mask;
  float mask_factor;
  ElementType result_type;
  bool raises;
};

// The entries of `kCount` neighbours, number `element` the first.
template <int kCount>
__device__ inline void find_entries(const Table& table, std::int64_t element,
                                    float (&shift)[kCount], float (&scale)[kCount]) {
  const RowTask& rows = table.rows;
  if constexpr (kCount >= 4) {
    if (table.quads) {
#pragma unroll
      for (int quad = 0; quad < kCount; quad += 4) {
        const std::int64_t first = row_at(rows, element + quad).row;
        const float4 b = __ldg(reinterpret_cast<const float4*>(rows.scale + first));
        scale[quad] = b.x, scale[quad + 1] = b.y, scale[quad + 2] = b.z, scale[quad + 3] = b.w;
        float4 a = {};
        if (rows.shift != nullptr) a = __ldg(reinterpret_cast<const float4*>(rows.shift + first));
        shift[quad] = a.x, shift[quad + 1] = a.y, shift[quad + 2] = a.z, shift[quad + 3] = a.w;
      }
      return;
    }
  }
  for_vector<kCount>(
      rows, element, [](Affine by) { return by; },
      [&](int j, Affine by) { shift[j] = by.shift, scale[j] = by.scale; });
}

__device__ inline float product_at(const EpilogueTask& task, std::int64_t element) {
  switch (task.product_type) {
    case ElementType::kF16:
      return core::to_float(static_cast<const Half*>(task.product)[element]);
    case ElementType::kBF16:
      return core::to_float(static_cast<const BFloat*>(task.product)[element]);
    default:
      return static_cast<const float*>(task.product)[element];
  }
}

// Two 16-bit elements as fp32.
__device__ inline void two_numbers(std::uint32_t word, bool half, float& first, float& second) {
  first = half ? low_number(word, Half{}) : low_number(word, BFloat{});
  second = half ? high_number(word, Half{}) : high_number(word, BFloat{});
}

// Times the second operand. `count` of the elements are there.
template <int kCount>
__device__ inline void multiply(const EpilogueTask& task, std::int64_t element, int count,
                                float (&x)[kCount]) {
  if (kCount == 1 || !task.product_aligned || count < kCount) {
#pragma unroll
    for (int j = 0; j < kCount; ++j)
      if (j < count) x[j] = x[j] * product_at(task, element + j);
    return;
  }
  if constexpr (kCount >= 4) {
    float by[kCount];
    if (task.product_type == ElementType::kF32) {
      const auto* from =
          reinterpret_cast<const float4*>(static_cast<const float*>(task.product) + element);
#pragma unroll
      for (int quad = 0; quad < kCount; quad += 4) {
        const float4 four = __ldcs(from + quad / 4);
        by[quad] = four.x, by[quad + 1] = four.y, by[quad + 2] = four.z, by[quad + 3] = four.w;
      }
    } else {
      const auto* from =
          reinterpret_cast<const uint2*>(static_cast<const std::uint16_t*>(task.product) + element);
      const bool half = task.product_type == ElementType::kF16;
#pragma unroll
      for (int quad = 0; quad < kCount; quad += 4) {
        const uint2 four = __ldcs(from + quad / 4);
        two_numbers(four.x, half, by[quad], by[quad + 1]);
        two_numbers(four.y, half, by[quad + 2], by[quad + 3]);
      }
    }
#pragma unroll
    for (int j = 0; j < kCount; ++j) x[j] = x[j] * by[j];
  }
}

// The mask's bits of `count` neighbours, the first lowest; at least one, at most eight.
__device__ inline std::uint32_t mask_bits(const EpilogueTask& task, std::int64_t element,
                                          int count) {
  const auto first = static_cast<std::uint64_t>(element);
  const std::uint32_t low = __ldg(task.mask + first / 8);
  const std::uint32_t high = __ldg(task.mask + (first + static_cast<unsigned>(count) - 1) / 8);
  return (low | high << 8) >> first % 8;
}

// Every stage but the last. `keep` has the bits of a mask. NaNs are made one kind when they are
// stored, not here.
template <int kCount>
__device__ inline void finish(const EpilogueTask& task, std::int64_t element, int count,
                              std::uint32_t keep, float (&x)[kCount]) {
  if (task.raises) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) x[j] = core::raised(x[j]);
  }
#pragma unroll 1  // finding the entries is most of this function's code
  for (int i = 0; i < task.table_count; ++i) {
    const Table& table = task.tables[i];
    float shift[kCount], scale[kCount];
    find_entries<kCount>(table, element, shift, scale);
    if (table.use == TableUse::kRestore) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) scale[j] = __frcp_rn(scale[j]);
    }
    if (table.use == TableUse::kScale) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) x[j] = (x[j] - shift[j]) * scale[j];
    } else {
#pragma unroll
      for (int j = 0; j < kCount; ++j) x[j] = x[j] * scale[j] + shift[j];
    }
  }
  core::with_activation(task.activation, [&](auto function) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) x[j] = function(x[j]);
  });
  if (task.product != nullptr) multiply(task, element, count, x);
  if (task.mask != nullptr) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) x[j] = (keep >> j & 1u) != 0 ? x[j] * task.mask_factor : 0.0f;
  }
}

// The result of one element, stored.
__device__ inline void store_result(const EpilogueTask& task, std::int64_t element, float x) {
  x = core::one_nan(x);
  switch (task.result_type) {
    case ElementType::kF16:
      static_cast<Half*>(task.packet.destination)[element] = core::from_float<Half>(x);
      break;
    case ElementType::kBF16:
      static_cast<BFloat*>(task.packet.destination)[element] = core::from_float<BFloat>(x);
      break;
    default:
      static_cast<float*>(task.packet.destination)[element] = x;
  }
}

// Results that are not numbers, or not far below bf16's limit. Out of line.
template <int kCount>
struct Values {
  float x[kCount];
};
template <int kCount>
__device__ __noinline__ void store_unusual(const EpilogueTask& task, std::int64_t element,
                                           int count, Values<kCount> values) {
#pragma unroll 1
  for (int j = 0; j < count; ++j) store_result(task, element + j, values.x[j]);
}

// The results of a vector of T, which has the size of the result's elements. `count` of them are
// there.
template <typename T>
__device__ inline void store_results(const EpilogueTask& task, std::int64_t element, int count,
                                     const float (&x)[kVector<T>]) {
  bool ordinary = task.packet.aligned && count >= kVector<T>;
#pragma unroll
  for (int j = 0; j < kVector<T>; ++j) ordinary = ordinary && fabsf(x[j]) <= 3e38f;
  if (!ordinary) {
    Values<kVector<T>> values;
#pragma unroll
    for (int j = 0; j < kVector<T>; ++j) values.x[j] = x[j];
    store_unusual(task, element, count < kVector<T> ? count : kVector<T>, values);
    return;
  }
  uint4 raw;
  if constexpr (sizeof(T) == 2) {
    raw = task.result_type == ElementType::kF16 ? from_floats<Half>(x) : from_floats<BFloat>(x);
  } else {
    raw = from_floats<T>(x);
  }
  __stcs(reinterpret_cast<uint4*>(static_cast<T*>(task.packet.destination) + element), raw);
}

// A group off the fast path, by a warp. `element` is the number of its first.
__device__ __noinline__ inline void finish_special(const EpilogueTask& task, std::int64_t group,
                                                   std::int64_t element, std::int64_t stride,
                                                   int count) {
  decode_special<float>(task.packet, group, count, [&](int i, float value) {
    const std::int64_t at = element + i * stride;
    float x[1] = {value};
    finish<1>(task, at, 1, task.mask != nullptr ? mask_bits(task, at, 1) : 0u, x);
    store_result(task, at, x[0]);
  });
}

}  // namespace backfold::cuda

#endif  // BACKFOLD_GROUP_CUDA_EPILOGUE_CUH_
