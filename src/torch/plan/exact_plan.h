// SPDX-License-Identifier: Apache-2.0
//
// Targets of bytes where nothing is rounded: products run again and, for a budget, bytes leave.

#ifndef BACKFOLD_TORCH_PLAN_EXACT_PLAN_H_
#define BACKFOLD_TORCH_PLAN_EXACT_PLAN_H_

#include <cstdint>

#include "torch/capture/site.h"
#include "torch/plan/plan.h"
#include "torch/plan/remaking.h"

namespace backfold::torch_layer {

// Marks as many sites as the target needs, and no others: to be made again or, of a budget, to
// leave where that takes less time. Raises ValueError if all of them are not enough.
RemadePlan plan_exactly(SiteTable& sites, const StepReference& reference, const Target& target,
                        std::int64_t step);

// Whether the marks in force are enough, and what they amount to.
bool is_kept(const SiteTable& sites, const StepReference& reference, const Target& target,
             std::int64_t step);
RemadePlan plan_in_force(const SiteTable& sites, const StepReference& reference, std::int64_t step);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PLAN_EXACT_PLAN_H_
