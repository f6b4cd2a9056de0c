// SPDX-License-Identifier: Apache-2.0
//
// The SIMD targets of this build, and how to reach a kernel of a given one.
//
// A kernel file is compiled once per target by Highway's foreach_target.h. Each pass defines a
// function that returns the file's table of kernels; HWY_EXPORT gathers those functions, and
// BACKFOLD_KERNELS_FOR picks the one of a target, so that a caller may force any of them.
//
// Targets without fused multiply-add (SSSE3, SSE4) are not built: the arithmetic of the formats
// fuses, and machines that old are served by the reference.

#ifndef BACKFOLD_BASE_TARGETS_H_
#define BACKFOLD_BASE_TARGETS_H_

#include <cstdint>
#include <string_view>
#include <vector>

#include "base/dispatch.h"

namespace backfold::cpu {

struct Targets {
  std::vector<core::SimdTarget> targets;  // best first
  std::vector<std::string_view> names;    // the same, by name
};

// What this build has and this machine runs. Computed once.
const Targets& targets();

// Highway's name for a target's bit.
std::string_view target_name(std::int64_t bit);

}  // namespace backfold::cpu

// The entry for a target's bit in the table that HWY_EXPORT(FUNCTION) made. For files that include
// highway.h; the bit is one of targets().
#define BACKFOLD_KERNELS_FOR(FUNCTION, BIT)                                                       \
  HWY_DISPATCH_TABLE(FUNCTION)                                                                    \
  [hwy::Num0BitsBelowLS1Bit_Nonzero64(                                                            \
      static_cast<std::uint64_t>((HWY_CHOSEN_TARGET_SHIFT(BIT) | HWY_CHOSEN_TARGET_MASK_SCALAR) & \
                                 HWY_CHOSEN_TARGET_MASK_TARGETS))]

#endif  // BACKFOLD_BASE_TARGETS_H_
