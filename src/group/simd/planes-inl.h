// SPDX-License-Identifier: Apache-2.0
//
// Codes of a few bits to bytes and back, for the SIMD target being compiled.
//
// A quarter of a group is one step: lane P of quarter k holds element k * group / 4 + P, so the
// four codes of a lane are neighbours in the plane (group.h), and codes move between lanes only to
// drop unused upper bits.

#if defined(BACKFOLD_GROUP_SIMD_PLANES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BACKFOLD_GROUP_SIMD_PLANES_INL_H_
#undef BACKFOLD_GROUP_SIMD_PLANES_INL_H_
#else
#define BACKFOLD_GROUP_SIMD_PLANES_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>

#include "base/simd/elements-inl.h"
#include "group/geometry.h"

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
HWY_BEFORE_NAMESPACE();
namespace backfold::cpu {
namespace HWY_NAMESPACE {

// The lower kWidth bits of the four bytes of each lane, side by side.
template <int kWidth>
HWY_INLINE VU narrow_bytes(VU bytes) {
  if constexpr (kWidth == 8) return bytes;
  const DU du;
  const VU part = hn::And(bytes, hn::Set(du, 0x0101'0101u * ((1u << kWidth) - 1u)));
  constexpr int kGap = 8 - kWidth;
  VU joined = hn::Or(part, hn::ShiftRight<kGap>(part));
  joined = hn::And(joined, hn::Set(du, 0x0001'0001u * ((1u << 2 * kWidth) - 1u)));
  joined = hn::Or(joined, hn::ShiftRight<2 * kGap>(joined));
  return hn::And(joined, hn::Set(du, static_cast<std::uint32_t>((1ull << 4 * kWidth) - 1)));
}

// The lower 4 * kWidth bits of each lane of two vectors, side by side. What stands above them in
// `high` is kept as far as there is room.
template <int kWidth>
HWY_INLINE VU join_pieces(VU low, VU high) {
  const DU du;
  const VU raised = hn::ShiftLeft<4 * kWidth>(high);
  if constexpr (kWidth == 4) {
    const hn::Repartition<std::uint16_t, DU> d16;
    return hn::BitCast(du, hn::OddEven(hn::BitCast(d16, raised), hn::BitCast(d16, low)));
  } else {
    return hn::Or(hn::And(low, hn::Set(du, (1u << 4 * kWidth) - 1u)), raised);
  }
}

// Stores the lower 4 * kWidth bits of each lane, packed, whatever stands above them; `lane` is the
// plane's lane of the first.
template <int kWidth>
HWY_INLINE void store_pieces(VU pieces, int lane, std::uint8_t* plane) {
  const DU du;
  if constexpr (kWidth == 8) {
    hn::StoreU(pieces, du, reinterpret_cast<std::uint32_t*>(plane) + lane);
  } else if constexpr (kWidth == 4) {
    const hn::Rebind<std::uint16_t, DU> d16;
    hn::StoreU(hn::TruncateTo(d16, pieces), d16, reinterpret_cast<std::uint16_t*>(plane) + lane);
  } else if constexpr (kWidth == 2) {
    const hn::Rebind<std::uint8_t, DU> d8;
    hn::StoreU(hn::TruncateTo(d8, pieces), d8, plane + lane);
  } else {
    static_assert(kWidth == 1);
    const hn::RepartitionToWide<DU> d64;
    const hn::Rebind<std::uint8_t, decltype(d64)> d8;
    const auto pairs = hn::BitCast(d64, hn::And(pieces, hn::Set(du, 0xfu)));
    const auto bytes = hn::Or(pairs, hn::ShiftRight<28>(pairs));
    hn::StoreU(hn::TruncateTo(d8, bytes), d8, plane + lane / 2);
  }
}

// The inverse: 4 * kWidth bits in each lane. Lanes of width 1 and 2 may carry more above them.
template <int kWidth>
HWY_INLINE VU load_pieces(int lane, const std::uint8_t* plane) {
  const DU du;
  if constexpr (kWidth == 8) {
    return hn::LoadU(du, reinterpret_cast<const std::uint32_t*>(plane) + lane);
  } else if constexpr (kWidth == 4) {
    const hn::Rebind<std::uint16_t, DU> d16;
    return hn::PromoteTo(du, hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(plane) + lane));
  } else if constexpr (kWidth == 2) {
    const hn::Rebind<std::uint8_t, DU> d8;
    return hn::PromoteTo(du, hn::LoadU(d8, plane + lane));
  } else {
    static_assert(kWidth == 1);
    const hn::RepartitionToWide<DU> d64;
    const hn::Rebind<std::uint8_t, decltype(d64)> d8;
    const hn::Rebind<std::uint32_t, decltype(d64)> d32;
    const auto bytes = hn::PromoteTo(d64, hn::PromoteTo(d32, hn::LoadU(d8, plane + lane / 2)));
    return hn::BitCast(du, hn::Or(bytes, hn::ShiftLeft<28>(bytes)));
  }
}

// Calls put(k, codes) for the four codes that each lane's pieces hold: pieces of the low plane and,
// for widths of two planes, of the high one. For lanes of 16 or 32 bits.
template <int kBits, class D, class V, typename Put>
HWY_INLINE void split_pieces(D d, V low, V high, const Put& put) {
  constexpr core::Planes kPlanes = core::planes_of(kBits);
  constexpr int kLow = kPlanes.low, kHigh = kPlanes.high;
  const V mask = hn::Set(d, (1u << kLow) - 1u);
  V c0 = hn::And(low, mask);
  V c1 = hn::And(hn::ShiftRight<kLow>(low), mask);
  V c2 = hn::And(hn::ShiftRight<2 * kLow>(low), mask);
  V c3 = hn::And(hn::ShiftRight<3 * kLow>(low), mask);
  if constexpr (kHigh != 0) {
    const V upper = hn::Set(d, ((1u << kHigh) - 1u) << kLow);
    const V raised = hn::ShiftLeft<kLow>(high);
    c0 = hn::Or(c0, hn::And(raised, upper));
    c1 = hn::Or(c1, hn::And(hn::ShiftRight<kHigh>(raised), upper));
    c2 = hn::Or(c2, hn::And(hn::ShiftRight<2 * kHigh>(raised), upper));
    c3 = hn::Or(c3, hn::And(hn::ShiftRight<3 * kHigh>(raised), upper));
  }
  put(0, c0);
  put(1, c1);
  put(2, c2);
  put(3, c3);
}

}  // namespace HWY_NAMESPACE
}  // namespace backfold::cpu
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET

#endif  // BACKFOLD_GROUP_SIMD_PLANES_INL_H_
