// SPDX-License-Identifier: Apache-2.0
//
// The program of an epilogue, step by step for the neighbouring elements that a lane holds. All
// threads take the same step, so what a step costs beside its arithmetic is a few instructions per
// vector.

#ifndef BACKFOLD_GROUP_CUDA_STEPS_CUH_
#define BACKFOLD_GROUP_CUDA_STEPS_CUH_

#include <cstdint>

#include "base/cuda/divider.h"
#include "base/cuda/elements.cuh"
#include "group/epilogue.h"

namespace backfold::cuda {

// How the entries of a vector's elements lie in a step's tensor.
enum class Spread : std::uint8_t {
  kWhole,  // one for each element
  kRows,   // shared by all of a vector
  kEach    // one by one
};

// A step as kernels want it.
struct StepTask {
  Step::Kind kind;
  Step::From from;
  Activation activation;
  ElementType type;
  Spread spread;
  bool aligned;  // vectors of the tensor can be loaded whole
  bool wide;     // elements are not all below 2^31: divisions are long
  bool second;   // of the two slots
  float factor;
  const void* data;  // tensor or mask
  Divider by_run, by_entries;
  std::int64_t run, entries;
};

__device__ inline std::int64_t entry_of(const StepTask& step, std::int64_t element) {
  if (step.spread == Spread::kWhole) return element;
  if (step.wide) return element / step.run % step.entries;
  return step.by_entries.remainder(step.by_run.quotient(static_cast<unsigned>(element)));
}

__device__ inline float number_at(ElementType type, const void* data, std::int64_t entry) {
  switch (type) {
    case ElementType::kF16:
      return core::to_float(static_cast<const Half*>(data)[entry]);
    case ElementType::kBF16:
      return core::to_float(static_cast<const BFloat*>(data)[entry]);
    default:
      return static_cast<const float*>(data)[entry];
  }
}

// Two 16-bit elements as fp32.
__device__ inline void two_numbers(std::uint32_t word, bool half, float& first, float& second) {
  first = half ? low_number(word, Half{}) : low_number(word, BFloat{});
  second = half ? high_number(word, Half{}) : high_number(word, BFloat{});
}

// Neighbouring elements of an aligned tensor, number `element` the first.
template <int kCount>
__device__ inline void load_numbers(ElementType type, const void* data, std::int64_t element,
                                    float (&x)[kCount]) {
  static_assert(kCount % 4 == 0);
  if (type == ElementType::kF32) {
    const auto* from = reinterpret_cast<const float4*>(static_cast<const float*>(data) + element);
#pragma unroll
    for (int quad = 0; quad < kCount; quad += 4) {
      const float4 four = __ldcs(from + quad / 4);
      x[quad] = four.x, x[quad + 1] = four.y, x[quad + 2] = four.z, x[quad + 3] = four.w;
    }
    return;
  }
  const auto* from =
      reinterpret_cast<const uint2*>(static_cast<const std::uint16_t*>(data) + element);
#pragma unroll
  for (int quad = 0; quad < kCount; quad += 4) {
    const uint2 four = __ldcs(from + quad / 4);
    two_numbers(four.x, type == ElementType::kF16, x[quad], x[quad + 1]);
    two_numbers(four.y, type == ElementType::kF16, x[quad + 2], x[quad + 3]);
  }
}

// The bits of `count` neighbours, the first lowest; at least one, at most eight.
__device__ inline std::uint32_t bits_at(const std::uint8_t* mask, std::int64_t element, int count) {
  const auto first = static_cast<std::uint64_t>(element);
  const std::uint32_t low = __ldg(mask + first / 8);
  const std::uint32_t high = __ldg(mask + (first + static_cast<unsigned>(count) - 1) / 8);
  return (low | high << 8) >> first % 8;
}

// The elements of a step's tensor for a vector, of which `count` elements are there.
template <int kCount>
__device__ inline void tensor_operands(const StepTask& step, std::int64_t element, int count,
                                       float (&by)[kCount]) {
  if (step.spread == Spread::kRows) {
    const float one = count > 0 ? number_at(step.type, step.data, entry_of(step, element)) : 0.0f;
#pragma unroll
    for (int j = 0; j < kCount; ++j) by[j] = one;
    return;
  }
  if constexpr (kCount >= 4) {
    if (step.aligned && count == kCount) {
      load_numbers(step.type, step.data, entry_of(step, element), by);
      return;
    }
  }
#pragma unroll
  for (int j = 0; j < kCount; ++j)
    by[j] = j < count ? number_at(step.type, step.data, entry_of(step, element + j)) : 0.0f;
}

// Numbers for a function out of line, in registers.
template <int kCount>
struct Values {
  float x[kCount];
};

// Runs a program on a vector, of which `count` elements are there. Out of line: inside of a kernel
// for each width it would take minutes to compile.
template <int kCount>
__device__ __noinline__ Values<kCount> after_steps(const StepTask* steps, int step_count,
                                                   std::int64_t element, int count,
                                                   Values<kCount> values) {
  auto& x = values.x;
  float first[kCount], second[kCount];
  const auto each = [](auto change) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) change(j);
  };
  each([&](int j) { first[j] = second[j] = 0.0f; });
#pragma unroll 1
  for (int i = 0; i < step_count; ++i) {
    const StepTask& step = steps[i];
    const float factor = step.factor;
    const auto combine = [&](auto operand) {
      if (step.kind == Step::Kind::kAdd)
        each([&](int j) { x[j] = x[j] + operand(j); });
      else
        each([&](int j) { x[j] = x[j] * operand(j); });
    };
    switch (step.kind) {
      case Step::Kind::kAdd:
      case Step::Kind::kMultiply:
        if (step.from == Step::From::kNumber) {
          combine([&](int) { return factor; });
        } else if (step.from == Step::From::kTensor) {
          float by[kCount];
          tensor_operands(step, element, count, by);
          combine([&](int j) { return factor * by[j]; });
        } else if (step.second) {
          combine([&](int j) { return factor * second[j]; });
        } else {
          combine([&](int j) { return factor * first[j]; });
        }
        break;
      case Step::Kind::kSquare:
        each([&](int j) { x[j] = x[j] * x[j]; });
        break;
      case Step::Kind::kCube:
        each([&](int j) { x[j] = x[j] * x[j] * x[j]; });
        break;
      case Step::Kind::kActivate:
        core::with_activation(step.activation,
                              [&](auto function) { each([&](int j) { x[j] = function(x[j]); }); });
        break;
      case Step::Kind::kMask: {
        const std::uint32_t keep =
            count > 0 ? bits_at(static_cast<const std::uint8_t*>(step.data), element, count) : 0u;
        each([&](int j) { x[j] = (keep >> j & 1u) != 0 ? x[j] * factor : 0.0f; });
        break;
      }
      case Step::Kind::kKeep:
        if (step.second)
          each([&](int j) { second[j] = x[j]; });
        else
          each([&](int j) { first[j] = x[j]; });
        break;
      case Step::Kind::kTake:
        if (step.second)
          each([&](int j) { x[j] = second[j]; });
        else
          each([&](int j) { x[j] = first[j]; });
        break;
    }
  }
  return values;
}

}  // namespace backfold::cuda

#endif  // BACKFOLD_GROUP_CUDA_STEPS_CUH_
