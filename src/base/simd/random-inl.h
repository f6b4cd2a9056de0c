// SPDX-License-Identifier: Apache-2.0
//
// Random numbers (base/rng.h) in vectors, for the SIMD target being compiled.

#if defined(BACKFOLD_BASE_SIMD_RANDOM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BACKFOLD_BASE_SIMD_RANDOM_INL_H_
#undef BACKFOLD_BASE_SIMD_RANDOM_INL_H_
#else
#define BACKFOLD_BASE_SIMD_RANDOM_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>

#include "base/rng.h"
#include "base/simd/elements-inl.h"

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
HWY_BEFORE_NAMESPACE();
namespace backfold::cpu {
namespace HWY_NAMESPACE {

// core::block_hash() of each lane's block, whose low bits have core::block_offset() added already.
HWY_INLINE VU block_hash(VU block, std::uint32_t second) {
  const DU du;
  VU x = hn::Xor(block, hn::ShiftRight<16>(block));
  x = hn::Add(hn::Mul(x, hn::Set(du, core::kHashMultiplier)), hn::Set(du, second));
  return hn::Xor(x, hn::ShiftRight<15>(x));
}

// core::unit_interval() of each lane.
HWY_INLINE VF unit_interval(VU random) {
  const DF d;
  const DU du;
  return hn::BitCast(d, hn::Or(hn::ShiftRight<9>(random), hn::Set(du, 0x3f80'0000u)));
}

}  // namespace HWY_NAMESPACE
}  // namespace backfold::cpu
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET

#endif  // BACKFOLD_BASE_SIMD_RANDOM_INL_H_
