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
#include <type_traits>

#include "base/arithmetic.h"
#include "base/simd/elements-inl.h"
#include "base/simd/reduce-inl.h"

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
HWY_BEFORE_NAMESPACE();
namespace backfold::cpu {
namespace HWY_NAMESPACE {

// Groups that are packed together: their ranges first, then their headers, a lane each, then their
// codes. The elements stay in the first-level cache meanwhile.
constexpr int kBatch = 16;

// The ranges of a batch of groups, found and then rounded outward.
struct RangeBatch {
  HWY_ALIGN float low[kBatch];
  HWY_ALIGN float high[kBatch];
  HWY_ALIGN std::uint32_t header[kBatch];
  HWY_ALIGN float base[kBatch];
  HWY_ALIGN float inverse[kBatch];
};

// Extremes of positive elements as zero-exact mode counts them: normal numbers, or 0 and 0 where
// none was found, `high` not positive. What is NaN stays so.
HWY_INLINE void count_positive(VF& low, VF& high) {
  const DF d;
  const VF least = hn::Set(d, 0x1p-126f);
  const auto none = hn::Le(high, hn::Zero(d));
  low = hn::IfThenZeroElse(none, hn::IfThenElse(hn::Lt(low, least), least, low));
  high = hn::IfThenZeroElse(none, hn::IfThenElse(hn::Lt(high, least), least, high));
}

// Finds the extremes of up to kBatch groups that follow each other; with kPositiveOnly, those of
// the positive elements. False if some element may not be finite: nothing is known of its group
// then. (Products of huge elements are taken for infinite ones.)
template <bool kPositiveOnly, int kGroup>
HWY_INLINE bool find_extremes(const float* values, int groups, RangeBatch& ranges) {
  const DF d;
  constexpr int kLanes = hn::MaxLanes(DF());
  static_assert(kGroup % (4 * kLanes) == 0);
  HWY_ALIGN float lows[kBatch * kLanes];
  HWY_ALIGN float highs[kBatch * kLanes];
  const VF zero = hn::Zero(d), infinity = hn::Set(d, INFINITY);
  VF marker = zero;
  for (int i = 0; i < groups; ++i) {
    // Four sets of running extremes: one would make each group a chain of dependent operations.
    VF low0 = infinity, low1 = infinity, low2 = infinity, low3 = infinity;
    VF high0 = hn::Neg(infinity), high1 = high0, high2 = high0, high3 = high0;
    VF marker0 = zero, marker1 = zero;
    const auto take = [&](int k, VF& low, VF& high) HWY_ATTR {
      const VF x = hn::LoadU(d, values + i * kGroup + k);
      high = hn::Max(high, x);
      low = hn::Min(low, kPositiveOnly ? hn::IfThenElse(hn::Gt(x, zero), x, infinity) : x);
      return x;
    };
    for (int k = 0; k < kGroup; k += 4 * kLanes) {
      const VF a = take(k, low0, high0), b = take(k + kLanes, low1, high1);
      const VF c = take(k + 2 * kLanes, low2, high2), e = take(k + 3 * kLanes, low3, high3);
      // Not finite from the first such element on: infinity times zero is NaN.
      marker0 = hn::MulAdd(a, b, marker0);
      marker1 = hn::MulAdd(c, e, marker1);
    }
    hn::Store(hn::Min(hn::Min(low0, low1), hn::Min(low2, low3)), d, lows + i * kLanes);
    hn::Store(hn::Max(hn::Max(high0, high1), hn::Max(high2, high3)), d, highs + i * kLanes);
    marker = hn::Add(marker, hn::Add(marker0, marker1));
  }
  for (int i = groups; i < kBatch; ++i)
    for (float* rows : {lows, highs}) hn::Store(zero, d, rows + i * kLanes);

  const auto min = [](VF a, VF b) HWY_ATTR { return hn::Min(a, b); };
  const auto max = [](VF a, VF b) HWY_ATTR { return hn::Max(a, b); };
  for (int i = 0; i < groups; i += kLanes) {
    VF low = reduce_rows(d, lows + i * kLanes, min), high = reduce_rows(d, highs + i * kLanes, max);
    if constexpr (kPositiveOnly) count_positive(low, high);
    hn::Store(low, d, ranges.low + i);
    hn::Store(high, d, ranges.high + i);
  }
  return hn::AllTrue(d, hn::Eq(hn::Mul(marker, zero), zero));
}

// The same for elements of 16 bits, on their words: the largest signed word is the largest positive
// element, and words without sign rise from the smallest positive element to the most negative one.
// An infinity or NaN is the largest of its sign either way: it ends up among the extremes.
template <bool kPositiveOnly, int kGroup, typename T>
HWY_INLINE bool find_extremes(const T* values, int groups, RangeBatch& ranges) {
  static_assert(sizeof(T) == 2);
  const hn::CappedTag<std::uint16_t, kBatch> d;
  const hn::RebindToSigned<decltype(d)> ds;
  using V = hn::Vec<decltype(d)>;
  constexpr int kLanes = hn::MaxLanes(d);
  const auto min = [](V a, V b) HWY_ATTR { return hn::Min(a, b); };
  const auto max = [](V a, V b) HWY_ATTR { return hn::Max(a, b); };
  const auto signed_max = [=](V a, V b) HWY_ATTR {
    return hn::BitCast(d, hn::Max(hn::BitCast(ds, a), hn::BitCast(ds, b)));
  };
  const auto negative = [=](V v) HWY_ATTR { return hn::Lt(hn::BitCast(ds, v), hn::Zero(ds)); };

  HWY_ALIGN std::uint16_t firsts[kBatch * kLanes];
  HWY_ALIGN std::uint16_t lasts[kBatch * kLanes];
  HWY_ALIGN std::uint16_t tops[kBatch * kLanes];
  for (int i = 0; i < groups; ++i) {
    const auto* words = reinterpret_cast<const std::uint16_t*>(values + i * kGroup);
    V first = hn::Set(d, 0xffffu), last = hn::Zero(d), top = hn::Set(d, 0x8000u);
    for (int k = 0; k < kGroup; k += kLanes) {
      const V x = hn::LoadU(d, words + k);
      // Less 1, zeros and negative elements all stand above the positive ones.
      first = hn::Min(first, kPositiveOnly ? hn::Sub(x, hn::Set(d, 1u)) : x);
      last = hn::Max(last, x);
      top = signed_max(top, x);
    }
    hn::Store(first, d, firsts + i * kLanes);
    hn::Store(last, d, lasts + i * kLanes);
    hn::Store(top, d, tops + i * kLanes);
  }
  for (int i = groups; i < kBatch; ++i)
    for (std::uint16_t* rows : {firsts, lasts, tops}) hn::Store(hn::Zero(d), d, rows + i * kLanes);

  HWY_ALIGN T lows[kBatch];
  HWY_ALIGN T highs[kBatch];
  for (int i = 0; i < groups; i += kLanes) {
    const V first = reduce_rows(d, firsts + i * kLanes, min);
    const V last = reduce_rows(d, lasts + i * kLanes, max);
    const V top = reduce_rows(d, tops + i * kLanes, signed_max);
    V low, high;
    if constexpr (kPositiveOnly) {
      constexpr std::uint16_t kBelowInf = std::is_same_v<T, core::Half> ? 0xfbff : 0xff7f;
      const V nan = hn::Set(d, 0xffffu);
      low = hn::Add(first, hn::Set(d, 1u));
      high = hn::IfThenElse(hn::Gt(last, hn::Set(d, kBelowInf)), nan, top);
    } else {
      low = hn::IfThenElse(hn::RebindMask(d, negative(last)), last, first);
      high = hn::IfThenElse(hn::RebindMask(d, negative(top)), first, top);
    }
    hn::Store(low, d, reinterpret_cast<std::uint16_t*>(lows) + i);
    hn::Store(high, d, reinterpret_cast<std::uint16_t*>(highs) + i);
  }
  const DF df;
  for (int i = 0; i < groups; i += static_cast<int>(hn::Lanes(df))) {
    VF low = load_floats(df, lows + i), high = load_floats(df, highs + i);
    if constexpr (kPositiveOnly) count_positive(low, high);
    hn::Store(low, df, ranges.low + i);
    hn::Store(high, df, ranges.high + i);
  }
  return true;
}

// Whether all elements of a group are finite.
HWY_INLINE bool all_finite(const float* values, int group) {
  const DF d;
  const VF zero = hn::Zero(d);
  VF marker = zero;
  for (int i = 0; i < group; i += static_cast<int>(hn::Lanes(d)))
    marker = hn::MulAdd(hn::LoadU(d, values + i), zero, marker);
  return hn::AllTrue(d, hn::Eq(marker, zero));
}

// Finds the extremes of up to kBatch groups. A bit for each group whose extremes count.
template <typename T>
std::uint32_t find_extremes(bool positive_only, int group, const T* values, int groups,
                            RangeBatch& ranges) {
  const bool finite = group == 256    ? positive_only
                                            ? find_extremes<true, 256>(values, groups, ranges)
                                            : find_extremes<false, 256>(values, groups, ranges)
                         : positive_only ? find_extremes<true, 128>(values, groups, ranges)
                                      : find_extremes<false, 128>(values, groups, ranges);
  std::uint32_t known = (1u << groups) - 1u;
  if constexpr (sizeof(T) == 4) {
    for (int i = 0; !finite && i < groups; ++i)
      if (!all_finite(values + i * group, group)) known &= ~(1u << i);
  }
  return known;
}

// fp64 elements as the floats that ranges and codes are made of, whole vectors of them.
inline void narrow_elements(const double* source, int count, float* values) {
  const DF d;
  for (int i = 0; i < count; i += static_cast<int>(hn::Lanes(d)))
    hn::Store(load_floats(d, source + i), d, values + i);
}

// The share of its steps that a range leaves free where no code can need its clamp (core::draw()).
constexpr float kRoom = 0x1p-18f;

// What became of the ranges; sets have a bit for each group.
struct Rounding {
  std::uint32_t within_limits = 0;
  std::uint32_t single = 0;  // of one value: the group may be constant
  bool clamp = false;        // some range grew by so little that a code may need its clamp
};

template <class D, class Mask>
HWY_INLINE std::uint32_t bits_of_mask(D d, Mask mask) {
  std::uint8_t bits[8] = {};
  hn::StoreMaskBits(d, mask, bits);
  return bits[0] | static_cast<std::uint32_t>(bits[1]) << 8;
}

// core::round_outward() for groups of finite elements, one in each lane; with `rotated`,
// core::round_outward_rotated(). Lanes of other groups may hold anything.
HWY_INLINE Rounding round_outward(RangeBatch& ranges, int groups, const core::Levels& levels,
                                  bool rotated) {
  const DF d;
  const DI di;
  const DU du;
  const VU exponent_mask = hn::Set(du, core::kExponentMask);
  const VF roomy = hn::Set(d, levels.count * (1.0f - kRoom));
  const VF huge = hn::Set(d, core::kHuge);
  Rounding rounding;
  for (int i = 0; i < groups; i += static_cast<int>(hn::Lanes(d))) {
    const VF low = hn::Load(d, ranges.low + i);
    const VF distance = hn::Abs(low);
    VF high = hn::Load(d, ranges.high + i);
    const auto within = hn::And(hn::Ge(low, hn::Neg(huge)), hn::Le(high, huge));
    rounding.within_limits |= bits_of_mask(d, within) << i;
    rounding.single |= bits_of_mask(d, hn::Eq(low, high)) << i;
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
    if (!hn::AllTrue(d, hn::Lt(hn::Mul(hn::Sub(high, base), inverse), roomy)))
      rounding.clamp = true;
  }
  rounding.within_limits &= (1u << groups) - 1u;
  return rounding;
}

}  // namespace HWY_NAMESPACE
}  // namespace backfold::cpu
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET

#endif  // BACKFOLD_GROUP_SIMD_RANGE_INL_H_
