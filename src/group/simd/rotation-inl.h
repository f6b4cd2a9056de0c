// SPDX-License-Identifier: Apache-2.0
//
// The rotation of 128 elements, for the SIMD target being compiled.

#if defined(BACKFOLD_GROUP_SIMD_ROTATION_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BACKFOLD_GROUP_SIMD_ROTATION_INL_H_
#undef BACKFOLD_GROUP_SIMD_ROTATION_INL_H_
#else
#define BACKFOLD_GROUP_SIMD_ROTATION_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>

#include "base/arithmetic.h"
#include "base/simd/elements-inl.h"

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
HWY_BEFORE_NAMESPACE();
namespace backfold::cpu {
namespace HWY_NAMESPACE {

// One butterfly within vectors: lanes that differ in bit `stride`.
HWY_INLINE VF butterfly(DF d, VF v, std::uint32_t stride) {
  const DU du;
  const DI di;
  const auto lane = hn::Iota(di, 0);
  const auto partner = hn::Xor(lane, hn::Set(di, static_cast<std::int32_t>(stride)));
  const VF swapped = hn::TableLookupLanes(v, hn::IndicesFromVec(d, partner));
  const VU upper = hn::And(hn::BitCast(du, lane), hn::Set(du, stride));
  const VU sign = hn::IfThenElseZero(hn::Ne(upper, hn::Zero(du)), hn::Set(du, 0x8000'0000u));
  return hn::Add(swapped, hn::BitCast(d, hn::Xor(hn::BitCast(du, v), sign)));
}

// H values, in place.
inline void hadamard(float* values) {
  const DF d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  for (int i = 0; i < core::kRotation; i += lanes) {
    VF v = hn::Load(d, values + i);
    for (int stride = 1; stride < lanes; stride *= 2)
      v = butterfly(d, v, static_cast<std::uint32_t>(stride));
    hn::Store(v, d, values + i);
  }
  for (int stride = lanes; stride < core::kRotation; stride *= 2) {
    for (int i = 0; i < core::kRotation; i += lanes) {
      if ((i & stride) != 0) continue;
      const VF a = hn::Load(d, values + i), b = hn::Load(d, values + i + stride);
      hn::Store(hn::Add(a, b), d, values + i);
      hn::Store(hn::Sub(a, b), d, values + i + stride);
    }
  }
}

// The sign bits that rotation flips in elements i, i + 1, ...
HWY_INLINE VU flipped_signs(int i) {
  const DU du;
  const VU lane = hn::Add(hn::Iota(du, 0), hn::Set(du, static_cast<std::uint32_t>(i % 32)));
  const VU odd = hn::And(lane, hn::Set(du, 1u));
  const VU bit = hn::Add(hn::ShiftRight<1>(lane), hn::ShiftLeft<4>(odd));  // core::sign_bit
  return hn::ShiftLeft<31>(hn::Shr(hn::Set(du, core::rotation_signs(i / 32)), bit));
}

// rotated = H D values; the two may be the same.
inline void rotate(const float* values, float* rotated) {
  const DF d;
  const DU du;
  for (int i = 0; i < core::kRotation; i += static_cast<int>(hn::Lanes(d))) {
    const VU bits = hn::BitCast(du, hn::LoadU(d, values + i));
    hn::Store(hn::BitCast(d, hn::Xor(bits, flipped_signs(i))), d, rotated + i);
  }
  hadamard(rotated);
}

// destination = D H values. Uses up `values`.
template <typename T>
void rotate_back(float* values, T* destination) {
  const DF d;
  const DU du;
  hadamard(values);
  for (int i = 0; i < core::kRotation; i += static_cast<int>(hn::Lanes(d))) {
    const VU bits = hn::Xor(hn::BitCast(du, hn::Load(d, values + i)), flipped_signs(i));
    store_elements<false>(d, hn::BitCast(d, bits), destination + i);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace backfold::cpu
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET

#endif  // BACKFOLD_GROUP_SIMD_ROTATION_INL_H_
