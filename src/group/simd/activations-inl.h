// SPDX-License-Identifier: Apache-2.0
//
// The activations of group/epilogue.h on vectors, for the SIMD target being compiled.

#if defined(BACKFOLD_GROUP_SIMD_ACTIVATIONS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BACKFOLD_GROUP_SIMD_ACTIVATIONS_INL_H_
#undef BACKFOLD_GROUP_SIMD_ACTIVATIONS_INL_H_
#else
#define BACKFOLD_GROUP_SIMD_ACTIVATIONS_INL_H_
#endif

#include <hwy/highway.h>

#include <cmath>
#include <cstddef>

#include "base/simd/elements-inl.h"
#include "group/epilogue.h"

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
HWY_BEFORE_NAMESPACE();
namespace backfold::cpu {
namespace HWY_NAMESPACE {

// core::polynomial() of vectors.
template <std::size_t kTerms>
HWY_INLINE VF polynomial(const float (&coefficients)[kTerms], VF x) {
  const DF d;
  VF sum = hn::Set(d, coefficients[kTerms - 1]);
  for (std::size_t i = kTerms - 1; i > 0; --i)
    sum = hn::MulAdd(sum, x, hn::Set(d, coefficients[i - 1]));
  return sum;
}

// e^x within two units in the last place from -87 to 88; 0 below, infinite above. Highway's own
// takes NaN for -infinity and has no upper end.
HWY_INLINE VF exponential(VF x) {
  // e^r = 1 + r + r^2 * P(r) for |r| <= log(2) / 2 (Cephes).
  constexpr float kP[] = {5.0000001201e-1f, 1.6666665459e-1f, 4.1665795894e-2f,
                          8.3334519073e-3f, 1.3981999507e-3f, 1.9875691500e-4f};
  const DF d;
  const DI di;
  const VF low = hn::Set(d, -87.0f), high = hn::Set(d, 88.0f);
  const VF inside = hn::Max(hn::Min(x, high), low);
  const VF n = hn::Round(hn::Mul(inside, hn::Set(d, 1.44269504f)));
  const VF r = hn::NegMulAdd(n, hn::Set(d, -2.12194440e-4f),
                             hn::NegMulAdd(n, hn::Set(d, 0.693359375f), inside));
  const VF power = hn::Add(hn::MulAdd(hn::Mul(r, r), polynomial(kP, r), r), hn::Set(d, 1.0f));
  const auto exponent = hn::Add(hn::ConvertTo(di, n), hn::Set(di, 127));
  const VF value = hn::Mul(power, hn::BitCast(d, hn::ShiftLeft<23>(exponent)));
  return hn::IfThenElse(hn::Gt(x, high), hn::Set(d, INFINITY),
                        hn::IfThenZeroElse(hn::Lt(x, low), value));
}

HWY_INLINE VF logistic(VF x) {
  const DF d;
  const VF one = hn::Set(d, 1.0f);
  return hn::Div(one, hn::Add(one, exponential(hn::Neg(x))));
}

HWY_INLINE VF gelu(VF x) {
  const DF d;
  const VF a = hn::Abs(x), one = hn::Set(d, 1.0f);
  const VF t = hn::Div(one, hn::MulAdd(hn::Set(d, core::kTailSlope), a, one));
  const VF tail = hn::Mul(
      t, exponential(hn::MulAdd(hn::Mul(hn::Set(d, -0.5f), a), a, polynomial(core::kTail, t))));
  return hn::Mul(x, hn::IfThenElse(hn::Lt(x, hn::Zero(d)), tail, hn::Sub(one, tail)));
}

HWY_INLINE VF gelu_tanh(VF x) {
  const DF d;
  const VF inner =
      hn::MulAdd(hn::Set(d, core::kGeluCubic), hn::Mul(x, x), hn::Set(d, core::kGeluInner));
  return hn::Mul(x, logistic(hn::Mul(x, inner)));
}

HWY_INLINE VF hyperbolic_tangent(VF x) {
  const DF d;
  const VF a = hn::Abs(x), square = hn::Mul(x, x), one = hn::Set(d, 1.0f);
  const VF near = hn::MulAdd(hn::Mul(polynomial(core::kTanh, square), square), a, a);
  const VF both = hn::Add(one, exponential(hn::Add(a, a)));
  const VF far = hn::Sub(one, hn::Div(hn::Set(d, 2.0f), both));
  return hn::CopySign(hn::IfThenElse(hn::Lt(a, hn::Set(d, core::kTanhNear)), near, far), x);
}

// Replaces `count` values, and what follows them up to a whole vector. (A vector's result does not
// depend on where a stretch ends, so that threads may share the work anywhere.)
template <typename Function>
HWY_INLINE void apply(Function function, float* values, int count) {
  const DF d;
  for (int i = 0; i < count; i += static_cast<int>(hn::Lanes(d))) {
    const VF x = hn::Load(d, values + i);
    hn::Store(hn::IfThenElse(hn::IsNaN(x), x, function(x)), d, values + i);
  }
}

inline void activate(Activation activation, float* values, int count) {
  switch (activation) {
    case Activation::kNone:
      return;
    case Activation::kGelu:
      return apply([](VF x) HWY_ATTR { return gelu(x); }, values, count);
    case Activation::kGeluTanh:
      return apply([](VF x) HWY_ATTR { return gelu_tanh(x); }, values, count);
    case Activation::kSilu:
      return apply([](VF x) HWY_ATTR { return hn::Mul(x, logistic(x)); }, values, count);
    case Activation::kSigmoid:
      return apply([](VF x) HWY_ATTR { return logistic(x); }, values, count);
    case Activation::kTanh:
      return apply([](VF x) HWY_ATTR { return hyperbolic_tangent(x); }, values, count);
    case Activation::kRelu:
      return apply([](VF x) HWY_ATTR { return hn::IfThenZeroElse(hn::Lt(x, hn::Zero(DF())), x); },
                   values, count);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace backfold::cpu
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET

#endif  // BACKFOLD_GROUP_SIMD_ACTIVATIONS_INL_H_
