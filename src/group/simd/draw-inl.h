// SPDX-License-Identifier: Apache-2.0
//
// Codes of whole groups of finite elements, for the SIMD target being compiled.

#if defined(BACKFOLD_GROUP_SIMD_DRAW_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BACKFOLD_GROUP_SIMD_DRAW_INL_H_
#undef BACKFOLD_GROUP_SIMD_DRAW_INL_H_
#else
#define BACKFOLD_GROUP_SIMD_DRAW_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>

#include "base/arithmetic.h"
#include "base/rng.h"
#include "base/simd/random-inl.h"
#include "base/widths.h"
#include "group/geometry.h"
#include "group/simd/planes-inl.h"

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
HWY_BEFORE_NAMESPACE();
namespace backfold::cpu {
namespace HWY_NAMESPACE {

// What is drawn: the codes of some groups. They are drawn in one call, as it takes as many
// instructions to set up the constants as to draw a quarter of a group.
struct GroupDraw {
  const float* values;
  std::uint8_t* codes;
  float base, inverse;
  std::uint32_t first_block;  // with the key's offset added
};

struct Draw {
  const GroupDraw* groups;
  int count;
  core::Levels levels;
  std::uint32_t second;  // of the key
};

// Random numbers of one step of lanes: eight elements share a hash, and a lane holds four of them.
struct Uniforms {
  VU hash;

  HWY_INLINE Uniforms(VU first_block, std::uint32_t second, int lane) {
    const VU lane_block = hn::Set(DU(), static_cast<std::uint32_t>(lane / 2));
    hash = block_hash(hn::Add(first_block, lane_block), second);
  }

  template <int kQuarter>
  HWY_INLINE VF in_one_to_two() const {
    const DU du;
    const VU multiplier = hn::OddEven(hn::Set(du, core::element_multiplier(4 + kQuarter)),
                                      hn::Set(du, core::element_multiplier(kQuarter)));
    return unit_interval(hn::Mul(hash, multiplier));
  }
};

// Codes of one quarter of a step, as floats. Zero-exact counts from 1 and keeps zeros; the plain
// mode leaves the 1 that `uniform` brought in for the caller to take off.
template <int kQuarter, bool kZeroExact, bool kClamp>
HWY_INLINE VF draw_quarter(const GroupDraw& draw, const float* values, float ceiling,
                           const Uniforms& uniforms) {
  const DF d;
  VF x = hn::LoadU(d, values);
  const auto positive = hn::Gt(x, hn::Zero(d));
  if constexpr (kZeroExact) x = hn::Max(x, hn::Set(d, 0x1p-126f));
  // x + (-base), not x - base: the load of x then folds into the addition.
  const VF raised = hn::MulAdd(hn::Add(hn::Set(d, -draw.base), x), hn::Set(d, draw.inverse),
                               uniforms.in_one_to_two<kQuarter>());
  const VF code = hn::Floor(kClamp ? hn::Min(raised, hn::Set(d, ceiling)) : raised);
  return kZeroExact ? hn::IfThenElseZero(positive, code) : code;
}

// Floats that are whole numbers below 2^23, less `excess`, in the low bits of each lane. What
// stands above them is for the caller to drop.
HWY_INLINE VU low_bits(VF v, float excess) {
  const DF d;
  const DU du;
  return hn::BitCast(du, hn::Add(v, hn::Set(d, 8388608.0f - excess)));
}

template <int kBits, bool kZeroExact, int kGroup>
HWY_INLINE void store_codes(VF c0, VF c1, VF c2, VF c3, int lane, std::uint8_t* codes) {
  const DF d;
  const DU du;
  // draw_quarter()'s 1 on top of every code of the plain mode.
  constexpr float kOne = kZeroExact ? 0.0f : 1.0f;
  if constexpr (kBits == 16) {
    const VU mask = hn::Set(du, 0xffffu);
    const VU first =
        hn::Or(hn::And(low_bits(c0, kOne), mask), hn::ShiftLeft<16>(low_bits(c1, kOne)));
    const VU second =
        hn::Or(hn::And(low_bits(c2, kOne), mask), hn::ShiftLeft<16>(low_bits(c3, kOne)));
    hn::StoreInterleaved2(first, second, du, reinterpret_cast<std::uint32_t*>(codes) + 2 * lane);
  } else if constexpr (kBits <= 2 || kBits == 4) {
    // Up to 4 * 4 bits: the sum of shifted codes is exact in fp32.
    constexpr float kShift = 1 << kBits;
    VF sum = hn::MulAdd(c3, hn::Set(d, kShift), c2);
    sum = hn::MulAdd(sum, hn::Set(d, kShift), c1);
    sum = hn::MulAdd(sum, hn::Set(d, kShift), c0);
    store_pieces<kBits>(low_bits(sum, kOne * (((kShift + 1) * kShift + 1) * kShift + 1)), lane,
                        codes);
  } else {
    constexpr core::Planes kPlanes = core::planes_of(kBits);
    const VU low = low_bits(hn::MulAdd(c1, hn::Set(d, 256.0f), c0), kOne * 257.0f);
    const VU high = low_bits(hn::MulAdd(c3, hn::Set(d, 256.0f), c2), kOne * 257.0f);
    const VU bytes = hn::Or(hn::And(low, hn::Set(du, 0xffffu)), hn::ShiftLeft<16>(high));
    store_pieces<kPlanes.low>(narrow_bytes<kPlanes.low>(bytes), lane, codes);
    if constexpr (kPlanes.high != 0) {
      const VU upper = narrow_bytes<kPlanes.high>(hn::ShiftRight<kPlanes.low>(bytes));
      store_pieces<kPlanes.high>(upper, lane, codes + kGroup * kPlanes.low / 8);
    }
  }
}

template <int kBits, bool kZeroExact, bool kClamp, int kGroup>
void draw_groups(const Draw& draw) {
  const DF d;
  const DU du;
  const VU pair = hn::ShiftRight<1>(hn::Iota(du, 0));
  const std::uint32_t second = draw.second;
  const float ceiling = draw.levels.ceiling;
  constexpr int kQuarter = kGroup / 4;
  for (int i = 0; i < draw.count; ++i) {
    const GroupDraw own = draw.groups[i];
    const VU first_block = hn::Add(hn::Set(du, own.first_block), pair);
    for (int lane = 0; lane < kQuarter; lane += static_cast<int>(hn::Lanes(d))) {
      const Uniforms uniforms(first_block, second, lane);
      const float* x = own.values + lane;
      const VF c0 = draw_quarter<0, kZeroExact, kClamp>(own, x, ceiling, uniforms);
      const VF c1 = draw_quarter<1, kZeroExact, kClamp>(own, x + kQuarter, ceiling, uniforms);
      const VF c2 = draw_quarter<2, kZeroExact, kClamp>(own, x + 2 * kQuarter, ceiling, uniforms);
      const VF c3 = draw_quarter<3, kZeroExact, kClamp>(own, x + 3 * kQuarter, ceiling, uniforms);
      store_codes<kBits, kZeroExact, kGroup>(c0, c1, c2, c3, lane, own.codes);
    }
  }
}

template <int kBits, bool kZeroExact>
void draw_groups_of(int group, bool clamp, const Draw& draw) {
  if (group == 256) return draw_groups<kBits, kZeroExact, true, 256>(draw);
  clamp ? draw_groups<kBits, kZeroExact, true, 128>(draw)
        : draw_groups<kBits, kZeroExact, false, 128>(draw);
}

inline void draw_codes(int bits, bool zero_exact, int group, bool clamp, const Draw& draw) {
  core::with_width<kCodeWidths>(bits, [&]<int kBits>() HWY_ATTR {
    zero_exact ? draw_groups_of<kBits, true>(group, clamp, draw)
               : draw_groups_of<kBits, false>(group, clamp, draw);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace backfold::cpu
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET

#endif  // BACKFOLD_GROUP_SIMD_DRAW_INL_H_
