// SPDX-License-Identifier: Apache-2.0
//
// The stages of an epilogue for the neighbouring elements that a lane holds. Which ones there are
// is known at run time and the same for all threads: a kernel per combination would take minutes to
// compile, a branch per vector takes two instructions.

#ifndef BACKFOLD_GROUP_CUDA_EPILOGUE_CUH_
#define BACKFOLD_GROUP_CUDA_EPILOGUE_CUH_

#include <cstdint>
#include <type_traits>

#include "base/cuda/elements.cuh"
#include "group/closed_form.h"
#include "group/cuda/special.cuh"
#include "group/cuda/steps.cuh"
#include "group/cuda/tables.cuh"
#include "group/cuda/task.cuh"
#include "group/epilogue.h"

namespace backfold::cuda {

// An epilogue as kernels want it, by value. Programs of an activation or a formula around one, a
// sum or product with a tensor and a mask, each at most once and in this order, have kernels of
// their own; the others are taken step by step.
struct EpilogueTask {
  GroupTask packet;
  Table packed_rows, rows, columns;
  Table runs;  // the first of those with Lookup::kHanded
  Activation activation;
  bool has_form;
  core::ClosedForm form;  // with the activation
  float number;           // a factor; 1: none
  const void* tensor;
  ElementType tensor_type;
  bool tensor_aligned;  // it starts on 16 bytes, and so does each of its rows, if strided
  bool adds;            // the tensor; else it is a factor
  const std::uint8_t* mask;
  bool mask_in_bytes;  // no vector's bits lie in two bytes
  float mask_factor;
  ElementType result_type;
  bool raises;
  std::uint32_t magic;  // as codes.cuh wants it
  int step_count;       // of a program to be taken step by step; else 0
  StepTask steps[kMaxSteps];
};

// The value of a code that is given times 2^place, as a float. Its step is divided by that exactly:
// it has 8 bits and is at least 2^-126, and the place is 16 at most.
__device__ inline float value_of_placed(float code, int place, bool zero_exact,
                                        const core::Grid& grid) {
  const float one = static_cast<float>(1 << place), step = grid.step * (1.0f / one);
  if (!zero_exact) return __fmaf_rn(code, step, grid.base);
  const float value = fmaxf(__fmaf_rn(code - one, step, grid.base), 0x1p-126f);
  return code == 0.0f ? 0.0f : value;
}

// A vector of values, of a packet that may be zero-exact.
template <int kCount, typename ValueAt>
__device__ inline void decode(bool zero_exact, ValueAt value_at, float (&x)[kCount]) {
  if (zero_exact) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) x[j] = value_at(j, true);
  } else {
#pragma unroll
    for (int j = 0; j < kCount; ++j) x[j] = value_at(j, false);
  }
}

// Plus or times the elements of the tensor, of which `count` are there.
template <int kCount>
__device__ inline void combine(const EpilogueTask& task, std::int64_t element, int count,
                               float (&x)[kCount]) {
  float by[kCount];
  bool loaded = false;
  if constexpr (kCount >= 4) {
    loaded = task.tensor_aligned && count == kCount;
    if (loaded) load_numbers(task.tensor_type, task.tensor, element, by);
  }
  if (!loaded) {
#pragma unroll
    for (int j = 0; j < kCount; ++j)
      by[j] = j < count ? number_at(task.tensor_type, task.tensor, element + j) : 0.0f;
  }
  if (task.adds) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) x[j] = x[j] + by[j];
  } else {
#pragma unroll
    for (int j = 0; j < kCount; ++j) x[j] = x[j] * by[j];
  }
}

// What follows the tables.
enum class Tail {
  kNorm,   // a relu, a tensor, a mask
  kUsual,  // an activation or a formula, a tensor, a mask
  kSteps   // a program
};
__host__ __device__ constexpr Tail tail_of(Plan plan) {
  return is_linear(plan) ? Tail::kNorm : plan == Plan::kSteps ? Tail::kSteps : Tail::kUsual;
}

// An activation, in a formula if there is one, and a number.
template <int kCount>
__device__ inline void activate(const EpilogueTask& task, float (&x)[kCount]) {
  float y[kCount];
#pragma unroll
  for (int j = 0; j < kCount; ++j) y[j] = x[j];
  if (task.has_form) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) y[j] = core::argument(task.form, x[j]);
  }
  core::with_activation(task.activation, [&](auto function) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) y[j] = function(y[j]);
  });
  if (task.has_form) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) y[j] = core::completed(task.form, x[j], y[j]);
  }
  if (task.number != 1.0f) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) y[j] = y[j] * task.number;
  }
#pragma unroll
  for (int j = 0; j < kCount; ++j) x[j] = y[j];
}

// Every stage but the last. `keep` has the bits of a mask. NaNs are made one kind when they are
// stored, not here. `by_tables` applies the tables' stages.
template <Tail kTail, int kCount, typename ByTables>
__device__ inline void finish(const EpilogueTask& task, std::int64_t element, int count,
                              std::uint32_t keep, ByTables by_tables, float (&x)[kCount]) {
  if (kTail != Tail::kNorm && task.raises) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) x[j] = core::raised(x[j]);
  }
  by_tables(x);
  if constexpr (kTail == Tail::kSteps) {
    Values<kCount> values;
#pragma unroll
    for (int j = 0; j < kCount; ++j) values.x[j] = x[j];
    values = after_steps(task.steps, task.step_count, element, count, values);
#pragma unroll
    for (int j = 0; j < kCount; ++j) x[j] = values.x[j];
    return;
  }
  if constexpr (kTail == Tail::kNorm) {
    if (task.activation == Activation::kRelu) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) x[j] = core::relu(x[j]);
    }
  } else {
    activate(task, x);
  }
  if (task.tensor != nullptr) combine(task, element, count, x);
  if (task.mask != nullptr) {
    if (task.mask_factor != 1.0f) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) x[j] = x[j] * task.mask_factor;
    }
#pragma unroll
    for (int j = 0; j < kCount; ++j) x[j] = (keep >> j & 1u) != 0 ? x[j] : 0.0f;
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

// Results that are not finite numbers, or not aligned. Out of line.
template <int kCount>
__device__ __noinline__ void store_unusual(const EpilogueTask& task, std::int64_t element,
                                           int count, Values<kCount> values) {
#pragma unroll 1
  for (int j = 0; j < count; ++j) store_result(task, element + j, values.x[j]);
}

// A vector of elements of the values, and whether all are finite: then 0 times each adds up to 0,
// with fewer instructions than comparisons take.
template <typename T>
__device__ inline bool rounded(const float (&x)[kVector<T>], uint4& raw) {
  if constexpr (sizeof(T) == 2) {
    using Pair = std::conditional_t<std::is_same_v<T, Half>, __half2, __nv_bfloat162>;
    const std::uint32_t none = 0;
    const Pair zero = reinterpret_cast<const Pair&>(none);
    Pair sum = zero, pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (std::is_same_v<T, Half>)
        pairs[i] = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
      else
        pairs[i] = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
      sum = __hfma2(pairs[i], zero, sum);
    }
    const auto word = [](const Pair& pair) { return reinterpret_cast<const std::uint32_t&>(pair); };
    raw = make_uint4(word(pairs[0]), word(pairs[1]), word(pairs[2]), word(pairs[3]));
    return word(sum) == 0;
  } else {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kVector<T>; ++j) sum = __fmaf_rn(x[j], 0.0f, sum);
    raw = from_floats<T>(x);
    return sum == 0.0f;
  }
}

// The results of a vector of T, which has the size of the result's elements. `count` of them are
// there; `whole`: all, on 16 bytes.
template <typename T>
__device__ inline void store_results(const EpilogueTask& task, std::int64_t element, int count,
                                     bool whole, const float (&x)[kVector<T>]) {
  uint4 raw;
  bool finite;
  if constexpr (sizeof(T) == 2) {
    finite =
        task.result_type == ElementType::kF16 ? rounded<Half>(x, raw) : rounded<BFloat>(x, raw);
  } else {
    finite = rounded<T>(x, raw);
  }
  if (finite && whole) {
    __stcs(reinterpret_cast<uint4*>(static_cast<T*>(task.packet.destination) + element), raw);
    return;
  }
  Values<kVector<T>> values;
#pragma unroll
  for (int j = 0; j < kVector<T>; ++j) values.x[j] = x[j];
  store_unusual(task, element, count < kVector<T> ? count : kVector<T>, values);
}

// A group off the fast path, by a warp. `element` is the number of its first.
template <bool kSteps>
__device__ __noinline__ void finish_special(const EpilogueTask& task, std::int64_t group,
                                            std::int64_t element, std::int64_t stride, int count) {
  decode_special<float>(task.packet, group, count, [&](int i, float value) {
    const std::int64_t at = element + i * stride;
    float x[1] = {value};
    const auto by_tables = [&](float(&y)[1]) {
      change_each<TableUse::kRestore>(task.packed_rows, at, y);
      change_each<TableUse::kScale>(task.rows, at, y);
      change_each<TableUse::kWeigh>(task.columns, at, y);
    };
    finish<kSteps ? Tail::kSteps : Tail::kUsual>(
        task, at, 1, !kSteps && task.mask != nullptr ? bits_at(task.mask, at, 1) : 0u, by_tables,
        x);
    store_result(task, at, x[0]);
  });
}

Status launch_flat_epilogue(Plan plan, const EpilogueTask& task, cudaStream_t stream);
Status launch_strided_epilogue(Plan plan, const EpilogueTask& task, cudaStream_t stream);

}  // namespace backfold::cuda

#endif  // BACKFOLD_GROUP_CUDA_EPILOGUE_CUH_
