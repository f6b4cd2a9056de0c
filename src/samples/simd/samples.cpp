// SPDX-License-Identifier: Apache-2.0
//
// Scores of samples, SIMD. Groups off the fast path go to the reference.

#include "samples/simd/samples.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "samples/simd/samples.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>

#include "base/convert.h"
#include "base/targets.h"
#include "samples/reference.h"
#include "samples/score.h"

// After foreach_target.h: compiled again for each target.
#include "group/simd/range-inl.h"

HWY_BEFORE_NAMESPACE();
namespace backfold::cpu {
namespace HWY_NAMESPACE {
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128

// Never chosen (targets.cpp): the reference serves machines without SIMD.
SampleKernels ScoreKernels() { return {}; }

#else

template <typename T>
float ScoreTyped(const SampleFormat& format, const T* first) {
  HWY_ALIGN float buffer[sizeof(T) == 8 ? kBatch * core::kSampleGroup : 1];
  RangeBatch ranges;
  core::Score score;
  const std::int64_t whole = format.per_sample / core::kSampleGroup;
  for (std::int64_t group = 0; group < whole; group += kBatch) {
    const T* elements = first + group * core::kSampleGroup;
    const int groups = static_cast<int>(std::min<std::int64_t>(kBatch, whole - group));
    std::uint32_t known;
    if constexpr (sizeof(T) == 8) {
      narrow_elements(elements, groups * core::kSampleGroup, buffer);
      known = find_extremes(false, core::kSampleGroup, buffer, groups, ranges);
    } else {
      known = find_extremes(false, core::kSampleGroup, elements, groups, ranges);
    }
    for (int i = 0; i < groups; ++i)
      score.add((known >> i & 1u) != 0
                    ? core::squared_range(ranges.low[i], ranges.high[i])
                    : core::reference_squared_range(format.type, elements + i * core::kSampleGroup,
                                                    core::kSampleGroup));
  }
  const std::int64_t rest = format.per_sample % core::kSampleGroup;
  if (rest > 0)
    score.add(core::reference_squared_range(format.type, first + whole * core::kSampleGroup, rest));
  return score.total();
}

float ScoreOf(const SampleFormat& format, const void* first) {
  return core::with_element(format.type, [&]<typename T>() HWY_ATTR {
    return ScoreTyped(format, static_cast<const T*>(first));
  });
}

SampleKernels ScoreKernels() { return {HWY_TARGET, &ScoreOf}; }

#endif  // HWY_TARGET
}  // namespace HWY_NAMESPACE
}  // namespace backfold::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace backfold::cpu {

HWY_EXPORT(ScoreKernels);

SampleKernels sample_kernels(std::int64_t target_bit) {
  return BACKFOLD_KERNELS_FOR(ScoreKernels, target_bit)();
}

}  // namespace backfold::cpu
#endif  // HWY_ONCE
