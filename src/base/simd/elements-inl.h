// SPDX-License-Identifier: Apache-2.0
//
// Elements of every type as vectors of fp32, and back, for the SIMD target being compiled.

#if defined(BACKFOLD_BASE_SIMD_ELEMENTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BACKFOLD_BASE_SIMD_ELEMENTS_INL_H_
#undef BACKFOLD_BASE_SIMD_ELEMENTS_INL_H_
#else
#define BACKFOLD_BASE_SIMD_ELEMENTS_INL_H_
#endif

#include <hwy/highway.h>

#include <cfloat>
#include <cstdint>

#include "base/convert.h"

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
HWY_BEFORE_NAMESPACE();
namespace backfold::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// At most 16 lanes: a quarter of a group is a whole number of vectors.
using DF = hn::CappedTag<float, 16>;
using DI = hn::RebindToSigned<DF>;
using DU = hn::RebindToUnsigned<DF>;
using VF = hn::Vec<DF>;
using VU = hn::Vec<DU>;

HWY_INLINE VF load_floats(DF d, const float* source) { return hn::LoadU(d, source); }

HWY_INLINE VF load_floats(DF d, const core::BFloat* source) {
  const hn::Rebind<std::uint16_t, DF> d16;
  const auto bits = hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(source));
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(DU(), bits)));
}

HWY_INLINE VF load_floats(DF d, const core::Half* source) {
  const hn::Rebind<hwy::float16_t, DF> d16;
  return hn::PromoteTo(d, hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(source)));
}

HWY_INLINE VF load_floats(DF d, const double* source) {
  const hn::Half<DF> half;
  const hn::Rebind<double, hn::Half<DF>> wide;
  const auto low = hn::DemoteTo(half, hn::LoadU(wide, source));
  const auto high = hn::DemoteTo(half, hn::LoadU(wide, source + hn::Lanes(half)));
  return hn::Combine(d, high, low);
}

// The same numbers as core::to_float(): fp64 elements that are finite stay finite.
template <typename T>
HWY_INLINE VF load_numbers(DF d, const T* source) {
  return load_floats(d, source);
}
template <>
HWY_INLINE VF load_numbers(DF d, const double* source) {
  const hn::Half<DF> half;
  const hn::Rebind<double, hn::Half<DF>> wide;
  const auto number = [&](const double* from) HWY_ATTR {
    const auto v = hn::LoadU(wide, from);
    const auto most = hn::Set(wide, static_cast<double>(FLT_MAX));
    const auto clamped = hn::Max(hn::Min(v, most), hn::Neg(most));
    return hn::DemoteTo(half, hn::IfThenElse(hn::IsFinite(v), clamped, v));
  };
  return hn::Combine(d, number(source + hn::Lanes(half)), number(source));
}

template <bool kStream, class D, class V>
HWY_INLINE void put_vector(V v, D d, hn::TFromD<D>* destination) {
  if constexpr (kStream) {
    hn::Stream(v, d, destination);
  } else {
    hn::StoreU(v, d, destination);
  }
}

template <bool kStream>
HWY_INLINE void store_elements(DF d, VF v, float* destination) {
  put_vector<kStream>(v, d, destination);
}

// bf16 in the upper half of each lane, and bits that rounding leaves below. The values are finite
// and far below bf16's limit: rounding cannot overflow.
HWY_INLINE VU round_to_bfloat(VF v) {
  const DU du;
  const VU bits = hn::BitCast(du, v);
  const VU odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
  return hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7fffu)));
}

template <bool kStream>
HWY_INLINE void store_elements(DF, VF v, core::BFloat* destination) {
  const hn::Rebind<std::uint16_t, DF> d16;
  put_vector<kStream>(hn::TruncateTo(d16, hn::ShiftRight<16>(round_to_bfloat(v))), d16,
                      reinterpret_cast<std::uint16_t*>(destination));
}

HWY_INLINE hn::Vec<hn::Rebind<std::uint16_t, DF>> round_to_half(VF v) {
  const DF d;
  const hn::Rebind<hwy::float16_t, DF> d16;
  const VF finite = hn::Max(hn::Min(v, hn::Set(d, 65504.0f)), hn::Set(d, -65504.0f));
  return hn::BitCast(hn::Rebind<std::uint16_t, DF>(), hn::DemoteTo(d16, finite));
}

template <bool kStream>
HWY_INLINE void store_elements(DF, VF v, core::Half* destination) {
  put_vector<kStream>(round_to_half(v), hn::Rebind<std::uint16_t, DF>(),
                      reinterpret_cast<std::uint16_t*>(destination));
}

// Values of even and of odd places as elements side by side, of the type that is pointed to.
using VHalves = hn::Vec<hn::Repartition<std::uint16_t, DF>>;

HWY_INLINE VHalves interleaved_elements(VF even, VF odd, const core::BFloat*) {
  const hn::Repartition<std::uint16_t, DF> d16;
  return hn::OddEven(hn::BitCast(d16, round_to_bfloat(odd)),
                     hn::BitCast(d16, hn::ShiftRight<16>(round_to_bfloat(even))));
}

HWY_INLINE VHalves interleaved_elements(VF even, VF odd, const core::Half*) {
  const DU du;
  const VU upper = hn::ShiftLeft<16>(hn::PromoteTo(du, round_to_half(odd)));
  return hn::BitCast(hn::Repartition<std::uint16_t, DF>(),
                     hn::Or(hn::PromoteTo(du, round_to_half(even)), upper));
}

template <bool kStream>
HWY_INLINE void store_elements(DF, VF v, double* destination) {
  const hn::Half<DF> half;
  const hn::Rebind<double, hn::Half<DF>> wide;
  put_vector<kStream>(hn::PromoteTo(wide, hn::LowerHalf(half, v)), wide, destination);
  put_vector<kStream>(hn::PromoteTo(wide, hn::UpperHalf(half, v)), wide,
                      destination + hn::Lanes(half));
}

}  // namespace HWY_NAMESPACE
}  // namespace backfold::cpu
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET

#endif  // BACKFOLD_BASE_SIMD_ELEMENTS_INL_H_
