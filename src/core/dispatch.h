// SPDX-License-Identifier: Apache-2.0
//
// Which backend serves a call.

#ifndef BACKFOLD_CORE_DISPATCH_H_
#define BACKFOLD_CORE_DISPATCH_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "backfold/execution.h"

namespace backfold::core {

struct SimdTarget {
  std::string_view name;
  std::int64_t bit;  // Highway's
};

// The target of that name, or the best one for an empty name; null where there is none.
const SimdTarget* find_simd_target(std::string_view name);

// The names of simd_targets(), separated by commas; "none" if there are none.
std::string list_simd_targets();

// The SIMD target that serves a host call, null for the reference. Reports the choice to
// execution.ran. The execution has passed check_execution().
const SimdTarget* choose_host_target(const Execution& execution);

}  // namespace backfold::core

#endif  // BACKFOLD_CORE_DISPATCH_H_
