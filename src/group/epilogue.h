// SPDX-License-Identifier: Apache-2.0
//
// The arithmetic of an epilogue (backfold/epilogue.h), once for host and device; row_affine.h has
// that of its first stages. The SIMD kernels repeat the activations on vectors, operation by
// operation, from the same constants, and differ in exponential() and quotient() alone.

#ifndef BACKFOLD_GROUP_EPILOGUE_H_
#define BACKFOLD_GROUP_EPILOGUE_H_

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "backfold/epilogue.h"
#include "base/convert.h"
#include "base/host_device.h"
#include "group/row_affine.h"

namespace backfold::core {

// e^x within 1e-6 relative for |x| up to 16; beyond, what counts below is that it is tiny or huge.
// On the device two instructions: one more per element of bf16 is 5% of a memory-bound kernel.
BACKFOLD_HD float exponential(float x) {
#ifdef __CUDA_ARCH__
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * 1.44269504f));
  return power;
#else
  return std::exp(x);
#endif
}

// numerator / denominator, within three units in the last place; the denominator is at least 1.
BACKFOLD_HD float quotient(float numerator, float denominator) {
#ifdef __CUDA_ARCH__
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(denominator));
  return numerator * inverse;
#else
  return numerator / denominator;
#endif
}

// The polynomial with these coefficients, the constant first.
template <const auto& kCoefficients, std::size_t kFirst = 0>
BACKFOLD_HD float polynomial(float x) {
  constexpr float kTerm = kCoefficients[kFirst];
  if constexpr (kFirst + 1 == sizeof(kCoefficients) / sizeof(float))
    return kTerm;
  else
    return fused(polynomial<kCoefficients, kFirst + 1>(x), x, kTerm);
}

BACKFOLD_HD float logistic(float x) { return quotient(1.0f, 1.0f + exponential(-x)); }

// x * Phi(x). The normal distribution's tail at a = |x| is t * exp(P(t) - a^2 / 2) with t = 1 / (1
// + 0.29 a): P was fitted on [0, 6.5] and is off by 6e-8. Where x < 0 the tail is the factor
// itself, so nothing cancels.
inline constexpr float kTailSlope = 0.29f;
inline constexpr float kTail[] = {-2.18292511f, 1.22795024f,  -0.390867137f,
                                  1.60738973f,  -1.25645532f, 0.301760857f};
BACKFOLD_HD float gelu(float x) {
  const float a = fabsf(x);
  const float t = quotient(1.0f, fused(kTailSlope, a, 1.0f));
  const float tail = t * exponential(fused(-0.5f * a, a, polynomial<kTail>(t)));
  return x * (x < 0.0f ? tail : 1.0f - tail);
}

// (1 + tanh(u)) / 2 is the logistic function of 2u.
inline constexpr float kGeluInner = 1.59576912f;    // 2 * sqrt(2 / pi)
inline constexpr float kGeluCubic = 0.0713548163f;  // that times 0.044715
BACKFOLD_HD float gelu_tanh(float x) {
  return x * logistic(x * fused(kGeluCubic, x * x, kGeluInner));
}

// Near 0, where the other form cancels, x + x^3 * P(x^2).
inline constexpr float kTanhNear = 0.625f;
inline constexpr float kTanh[] = {-0.333332819f, 0.133314422f, -0.0537397155f, 0.0206390887f,
                                  -0.00570498872f};
BACKFOLD_HD float hyperbolic_tangent(float x) {
  const float a = fabsf(x), square = x * x;
  const float near = fused(polynomial<kTanh>(square) * square, a, a);
  const float far = 1.0f - quotient(2.0f, 1.0f + exponential(2.0f * a));
  const float value = a < kTanhNear ? near : far;
  return x < 0.0f ? -value : value;
}

BACKFOLD_HD float relu(float x) { return x < 0.0f ? 0.0f : x; }

// Calls work(f) with the function that an activation names, not at all for none.
BACKFOLD_ANY_CALLABLE
template <typename Work>
BACKFOLD_HD void with_activation(Activation activation, const Work& work) {
  switch (activation) {
    case Activation::kNone:
      break;
    case Activation::kGelu:
      work([](float x) { return gelu(x); });
      break;
    case Activation::kGeluTanh:
      work([](float x) { return gelu_tanh(x); });
      break;
    case Activation::kSilu:
      work([](float x) { return x * logistic(x); });
      break;
    case Activation::kSigmoid:
      work([](float x) { return logistic(x); });
      break;
    case Activation::kTanh:
      work([](float x) { return hyperbolic_tangent(x); });
      break;
    case Activation::kRelu:
      work([](float x) { return relu(x); });
      break;
  }
}

// Whether decoded values of a packet must be raised: they are decoded as those of an fp32 tensor,
// and a positive one of fp16 is at least 2^-24.
inline bool raises(const GroupFormat& format) {
  return format.zero_exact && format.type == ElementType::kF16;
}
BACKFOLD_HD float raised(float x) {
  return x > 0.0f && x < smallest_positive<Half>() ? smallest_positive<Half>() : x;
}

// Columns as what restored() works on.
inline RowAffine columns_as_rows(const ColumnAffine& columns) {
  return {columns.bias, columns.weight, columns.run, columns.columns};
}

}  // namespace backfold::core

#endif  // BACKFOLD_GROUP_EPILOGUE_H_
