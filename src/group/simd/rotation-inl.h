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
#include <type_traits>
#include <utility>

#include "base/arithmetic.h"
#include "base/simd/elements-inl.h"

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
HWY_BEFORE_NAMESPACE();
namespace backfold::cpu {
namespace HWY_NAMESPACE {

// The sign bits that rotation flips, of elements as wide as T.
template <typename T>
struct FlippedSigns {
  HWY_ALIGN T bits[core::kRotation] = {};

  constexpr FlippedSigns() {
    for (int i = 0; i < core::kRotation; ++i) {
      const std::uint32_t flipped = core::rotation_signs(i / 32) >> core::sign_bit(i) & 1u;
      bits[i] = static_cast<T>(flipped << (8 * sizeof(T) - 1));
    }
  }
};
constexpr FlippedSigns<std::uint32_t> kFlippedSigns;
constexpr FlippedSigns<std::uint16_t> kFlippedHalves;

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

// The butterflies across vectors, of stride kFirst, 2 * kFirst, ... before kLast.
template <int kFirst, int kLast, int kVectors>
HWY_INLINE void butterflies_across(VF (&v)[kVectors]) {
  for (int stride = kFirst; stride < kLast; stride *= 2) {
    for (int i = 0; i < kVectors; ++i) {
      if ((i & stride) != 0) continue;
      const VF a = v[i], b = v[i + stride];
      v[i] = hn::Add(a, b);
      v[i + stride] = hn::Sub(a, b);
    }
  }
}

// What hadamard() holds in registers at a time.
constexpr int kPartVectors = 8;
constexpr int kPart = kPartVectors * static_cast<int>(hn::MaxLanes(DF()));
constexpr int kParts = core::kRotation / kPart;

// H values: load(part, v) gives elements part * kPart, ..., for a constant `part`; store(i, first,
// second) takes elements i, ... as two vectors. With kPairs such two vectors are not neighbours but
// the even and the odd elements of a stretch.
template <bool kPairs, typename Load, typename Store>
HWY_INLINE void hadamard(const Load& load, const Store& store) {
  const DF d;
  constexpr int kLanes = hn::MaxLanes(DF());
  HWY_ALIGN float parts[kParts][kPart];
  const auto turn = [&](auto part) HWY_ATTR {
    VF v[kPartVectors];
    load(part, v);
    if constexpr (kPairs) butterflies_across<1, 2>(v);
    for (int i = 0; i < kPartVectors; ++i) v[i] = butterflies_within(v[i]);
    butterflies_across<kPairs ? 2 : 1, kPartVectors>(v);
    if constexpr (kParts == 1) {
      for (int i = 0; i < kPartVectors; i += 2) store(i * kLanes, v[i], v[i + 1]);
    } else {
      for (int i = 0; i < kPartVectors; ++i) hn::Store(v[i], d, parts[part] + i * kLanes);
    }
  };
  [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) HWY_ATTR {
    (turn(std::integral_constant<int, kIndex>()), ...);
  }
  (std::make_integer_sequence<int, kParts>());
  if constexpr (kParts > 1) {
    for (int i = 0; i < kPart; i += 2 * kLanes) {
      VF even[kParts], odd[kParts];
      for (int part = 0; part < kParts; ++part) {
        even[part] = hn::Load(d, parts[part] + i);
        odd[part] = hn::Load(d, parts[part] + i + kLanes);
      }
      butterflies_across<1, kParts>(even);
      butterflies_across<1, kParts>(odd);
      for (int part = 0; part < kParts; ++part) store(part * kPart + i, even[part], odd[part]);
    }
  }
}

// rotated = H D elements
template <typename T>
HWY_INLINE void rotate(const T* elements, float* rotated) {
  const DF d;
  constexpr int kLanes = hn::MaxLanes(DF());
  const auto load = [&](auto part, VF(&v)[kPartVectors]) HWY_ATTR {
    for (int k = 0; k < kPartVectors; ++k) {
      const int i = part * kPart + k * kLanes;
      v[k] = flip_signs(load_floats(d, elements + i), i);
    }
  };
  hadamard<false>(load, [&](int i, VF first, VF second) HWY_ATTR {
    hn::Store(first, d, rotated + i);
    hn::Store(second, d, rotated + i + kLanes);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace backfold::cpu
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET

#endif  // BACKFOLD_GROUP_SIMD_ROTATION_INL_H_
