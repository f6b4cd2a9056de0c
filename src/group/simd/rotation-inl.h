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

// The sign bits that rotation flips.
struct FlippedSigns {
  HWY_ALIGN std::uint32_t bits[core::kRotation] = {};

  constexpr FlippedSigns() {
    for (int i = 0; i < core::kRotation; ++i)
      bits[i] = core::rotation_signs(i / 32) >> core::sign_bit(i) << 31;
  }
};
constexpr FlippedSigns kFlippedSigns;

HWY_INLINE VF flip_signs(VF v, int i) {
  const DU du;
  return hn::BitCast(DF(), hn::Xor(hn::BitCast(du, v), hn::Load(du, kFlippedSigns.bits + i)));
}

// Lanes that differ in bit kStride change places.
template <int kStride>
HWY_INLINE VF swap_lanes(VF v) {
  const DF d;
  if constexpr (kStride == 1) {
    return hn::Shuffle2301(v);
  } else if constexpr (kStride == 2) {
    return hn::Shuffle1032(v);
  } else if constexpr (kStride == 4) {
    return hn::SwapAdjacentBlocks(v);
  } else {
    static_assert(kStride == 8);
    return hn::ConcatLowerUpper(d, v, v);
  }
}

// The butterflies of stride kStride and more within a vector: a + b in the lower lane, a - b in the
// upper one.
template <int kStride = 1>
HWY_INLINE VF butterflies_within(VF v) {
  const DF d;
  const DU du;
  if constexpr (kStride == hn::MaxLanes(DF())) {
    return v;
  } else {
    const VU upper = hn::And(hn::Iota(du, 0), hn::Set(du, static_cast<std::uint32_t>(kStride)));
    const VF sign = hn::IfThenElse(hn::RebindMask(d, hn::Eq(upper, hn::Zero(du))), hn::Set(d, 1.0f),
                                   hn::Set(d, -1.0f));
    // Its own lane times 1 or -1 is exact.
    return butterflies_within<2 * kStride>(hn::MulAdd(v, sign, swap_lanes<kStride>(v)));
  }
}

// The butterflies across vectors.
template <int kVectors>
HWY_INLINE void butterflies_across(VF (&v)[kVectors]) {
  for (int stride = 1; stride < kVectors; stride *= 2) {
    for (int i = 0; i < kVectors; ++i) {
      if ((i & stride) != 0) continue;
      const VF a = v[i], b = v[i + stride];
      v[i] = hn::Add(a, b);
      v[i + stride] = hn::Sub(a, b);
    }
  }
}

// H values, in registers as far as they go: load(i) gives elements i, i + 1, ..., and store(i, v)
// takes them.
template <typename Load, typename Store>
HWY_INLINE void hadamard(const Load& load, const Store& store) {
  const DF d;
  constexpr int kLanes = hn::MaxLanes(DF());
  constexpr int kVectors = 8;
  constexpr int kPart = kVectors * kLanes;
  constexpr int kParts = core::kRotation / kPart;
  HWY_ALIGN float parts[core::kRotation];
  for (int part = 0; part < core::kRotation; part += kPart) {
    VF v[kVectors];
    for (int i = 0; i < kVectors; ++i) v[i] = butterflies_within(load(part + i * kLanes));
    butterflies_across(v);
    for (int i = 0; i < kVectors; ++i) {
      if constexpr (kParts == 1) {
        store(i * kLanes, v[i]);
      } else {
        hn::Store(v[i], d, parts + part + i * kLanes);
      }
    }
  }
  if constexpr (kParts > 1) {
    for (int i = 0; i < kPart; i += kLanes) {
      VF v[kParts];
      for (int part = 0; part < kParts; ++part) v[part] = hn::Load(d, parts + part * kPart + i);
      butterflies_across(v);
      for (int part = 0; part < kParts; ++part) store(part * kPart + i, v[part]);
    }
  }
}

// rotated = H D elements
template <typename T>
HWY_INLINE void rotate(const T* elements, float* rotated) {
  const DF d;
  hadamard([&](int i) HWY_ATTR { return flip_signs(load_floats(d, elements + i), i); },
           [&](int i, VF v) HWY_ATTR { hn::Store(v, d, rotated + i); });
}

// destination = D H values
template <bool kStream, typename T>
HWY_INLINE void rotate_back(const float* values, T* destination) {
  const DF d;
  hadamard([&](int i) HWY_ATTR { return hn::Load(d, values + i); },
           [&](int i, VF v)
               HWY_ATTR { store_elements<kStream>(d, flip_signs(v, i), destination + i); });
}

}  // namespace HWY_NAMESPACE
}  // namespace backfold::cpu
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET

#endif  // BACKFOLD_GROUP_SIMD_ROTATION_INL_H_
