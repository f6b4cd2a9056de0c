// SPDX-License-Identifier: Apache-2.0
//
// The ranges of groups, for the SIMD target being compiled.

#if defined(BACKFOLD_GROUP_SIMD_RANGE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BACKFOLD_GROUP_SIMD_RANGE_INL_H_
#undef BACKFOLD_GROUP_SIMD_RANGE_INL_H_
#else
#define BACKFOLD_GROUP_SIMD_RANGE_INL_H_
#endif

#include <hwy/highway.h>

#include <cmath>
#include <cstdint>

#include "base/arithmetic.h"
#include "base/simd/elements-inl.h"

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
HWY_BEFORE_NAMESPACE();
namespace backfold::cpu {
namespace HWY_NAMESPACE {

// Groups that are packed together: their ranges first, then their headers, a lane each, then their
// codes. The elements stay in the first-level cache meanwhile.
constexpr int kBatch = 16;

struct Extremes {
  float low, high;
  bool finite;

  bool within_limits() const { return finite && low >= -core::kHuge && high <= core::kHuge; }
  // Two values at least, none of them special: the fast path serves the group.
  bool plain() const { return within_limits() && low < high; }
};

// The extremes of `group` elements (a multiple of eight vectors), which are left in `buffer` as
// floats unless they are floats already. `positive_only`: as zero-exact mode counts them.
//
// Four sets of running extremes: one would make each group a chain of dependent operations.
template <bool kPositiveOnly, typename T>
Extremes read_group_as(const T* source, int group, float* buffer) {
  const DF d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const VF zero = hn::Zero(d);
  VF low0 = hn::Set(d, INFINITY), low1 = low0, low2 = low0, low3 = low0;
  VF high0 = hn::Set(d, -INFINITY), high1 = high0, high2 = high0, high3 = high0;
  VF marker0 = zero, marker1 = zero;
  const auto take = [&](int i, VF& low, VF& high) HWY_ATTR {
    const VF x = load_floats(d, source + i);
    if constexpr (sizeof(T) != sizeof(float)) hn::Store(x, d, buffer + i);
    high = hn::Max(high, x);
    if constexpr (kPositiveOnly) {
      const VF raised = hn::Max(x, hn::Set(d, 0x1p-126f));
      low = hn::Min(low, hn::IfThenElse(hn::Gt(x, zero), raised, hn::Set(d, INFINITY)));
    } else {
      low = hn::Min(low, x);
    }
    return x;
  };
  for (int i = 0; i < group; i += 4 * lanes) {
    const VF a = take(i, low0, high0), b = take(i + lanes, low1, high1);
    const VF c = take(i + 2 * lanes, low2, high2), e = take(i + 3 * lanes, low3, high3);
    // Not finite from the first such element on: infinity times zero is NaN.
    marker0 = hn::MulAdd(a, b, marker0);
    marker1 = hn::MulAdd(c, e, marker1);
  }
  const VF marker = hn::Add(marker0, marker1);
  const VF low = hn::Min(hn::Min(low0, low1), hn::Min(low2, low3));
  const VF high = hn::Max(hn::Max(high0, high1), hn::Max(high2, high3));
  float highest = hn::GetLane(hn::MaxOfLanes(d, high));
  if (kPositiveOnly && highest > 0.0f && highest < 0x1p-126f) highest = 0x1p-126f;
  // Products of huge elements may overflow too: the reference takes those groups as well.
  const bool finite = hn::AllTrue(d, hn::Eq(hn::Mul(marker, zero), zero));
  return {hn::GetLane(hn::MinOfLanes(d, low)), highest, finite};
}

template <typename T>
Extremes read_group(const T* source, int group, bool positive_only, float* buffer) {
  return positive_only ? read_group_as<true>(source, group, buffer)
                       : read_group_as<false>(source, group, buffer);
}

// The ranges of a batch of groups, rounded outward.
struct RangeBatch {
  HWY_ALIGN float low[kBatch] = {};
  HWY_ALIGN float high[kBatch] = {};
  HWY_ALIGN std::uint32_t header[kBatch];
  HWY_ALIGN float base[kBatch];
  HWY_ALIGN float inverse[kBatch];
};

// The share of its steps that a range leaves free where no code can need its clamp (core::draw()).
constexpr float kRoom = 0x1p-18f;

// core::round_outward() for groups of finite elements, one in each lane; with `rotated`,
// core::round_outward_rotated(). Lanes whose group is not on the fast path may hold anything.
//
// False if some range is rounded up by so little that a code might need its clamp (core::draw()).
inline bool round_outward(RangeBatch& ranges, int groups, const core::Levels& levels,
                          bool rotated) {
  const DF d;
  const DI di;
  const DU du;
  const VU exponent_mask = hn::Set(du, core::kExponentMask);
  const VF roomy = hn::Set(d, levels.count * (1.0f - kRoom));
  bool room = true;
  for (int i = 0; i < groups; i += static_cast<int>(hn::Lanes(d))) {
    const VF low = hn::Load(d, ranges.low + i);
    const VF distance = hn::Abs(low);
    VF high = hn::Load(d, ranges.high + i);
    if (rotated)
      high = hn::Max(high, hn::Add(low, hn::Mul(distance, hn::Set(d, core::kRotatedShare))));
    VF range = hn::Max(hn::Sub(high, low), hn::Set(d, core::kTiny));
    const auto near = hn::Le(distance, hn::Mul(range, hn::Set(d, core::kNear)));
    range =
        hn::IfThenElse(near, range, hn::Max(range, hn::Mul(distance, hn::Set(d, core::kFarShare))));
    const VU shift =
        hn::IfThenElse(hn::RebindMask(du, near), hn::Set(du, core::kNearShift * core::kOctave),
                       hn::Set(du, core::kFarShift * core::kOctave));

    VU exponent = hn::And(hn::BitCast(du, range), exponent_mask);
    VF minimum, base;
    VU step;
    const auto round = [&]() HWY_ATTR {
      const VU unit = hn::Sub(exponent, shift);
      minimum = hn::Floor(hn::Mul(low, hn::BitCast(d, hn::Sub(hn::Set(du, core::kInverse), unit))));
      base = hn::Mul(minimum, hn::BitCast(d, unit));
      const VF span = hn::Max(hn::Sub(high, base), hn::BitCast(d, exponent));
      const VU quotient = hn::BitCast(du, hn::Mul(span, hn::Set(d, levels.inverse_count)));
      step =
          hn::And(hn::Add(quotient, hn::Set(du, core::kStepRoundUp)), hn::Set(du, core::kStepMask));
    };
    round();
    const VF top = hn::Mul(hn::Set(d, levels.count), hn::BitCast(d, step));
    const auto carried = hn::Ne(hn::And(hn::BitCast(du, top), exponent_mask), exponent);
    exponent = hn::Add(exponent, hn::IfThenElseZero(carried, hn::Set(du, core::kOctave)));
    round();

    const VU count = hn::BitCast(du, hn::ConvertTo(di, minimum));
    const VU ordinary = hn::Or(step, hn::And(count, hn::Set(du, core::kMinimumMask)));
    const VU extended =
        hn::Or(hn::Or(step, hn::Set(du, core::kExtended)),
               hn::And(hn::ShiftLeft<2>(count), hn::Set(du, core::kFarMinimumMask)));
    hn::Store(hn::IfThenElse(hn::RebindMask(du, near), ordinary, extended), du, ranges.header + i);
    hn::Store(base, d, ranges.base + i);
    const VF inverse = hn::Div(hn::Set(d, 1.0f), hn::BitCast(d, step));
    hn::Store(inverse, d, ranges.inverse + i);
    room = room && hn::AllTrue(d, hn::Lt(hn::Mul(hn::Sub(high, base), inverse), roomy));
  }
  return room;
}

}  // namespace HWY_NAMESPACE
}  // namespace backfold::cpu
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET

#endif  // BACKFOLD_GROUP_SIMD_RANGE_INL_H_
