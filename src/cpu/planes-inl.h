// SPDX-License-Identifier: Apache-2.0
//
// Codes of a few bits to bytes and back, for the SIMD target being compiled.
//
// A quarter of a group is one step: lane P of quarter k holds element k * group / 4 + P, so the
// four codes of a lane are neighbours in the plane (group.h), and codes move between lanes only to
// drop unused upper bits.

#if defined(BACKFOLD_CPU_PLANES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BACKFOLD_CPU_PLANES_INL_H_
#undef BACKFOLD_CPU_PLANES_INL_H_
#else
#define BACKFOLD_CPU_PLANES_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>

#include "cpu/elements-inl.h"

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

}  // namespace HWY_NAMESPACE
}  // namespace backfold::cpu
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET

#endif  // BACKFOLD_CPU_PLANES_INL_H_
