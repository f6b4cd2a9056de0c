// SPDX-License-Identifier: Apache-2.0
//
// Scores of samples, SIMD. Groups off the fast path go to the reference.

#include "samples/simd/samples.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "samples/simd/samples.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

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
  HWY_ALIGN float buffer[core::kSampleGroup];
  core::Score score;
  for (std::int64_t at = 0; at < format.per_sample; at += core::kSampleGroup) {
    const std::int64_t left = format.per_sample - at;
    if (left >= core::kSampleGroup) {
      const Extremes extremes = read_group(first + at, core::kSampleGroup, false, buffer);
      if (extremes.finite) {
        score.add(core::squared_range(extremes.low, extremes.high));
        continue;
      }
    }
    score.add(core::reference_squared_range(format.type, first + at,
                                            left < core::kSampleGroup ? left : core::kSampleGroup));
  }
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
