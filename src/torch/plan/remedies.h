// SPDX-License-Identifier: Apache-2.0
//
// Which remedies a plan takes where widths alone are not enough: products that run again, and
// places that leave the device. Those that take least time for a byte come first, and no more of
// them than are enough.

#ifndef BACKFOLD_TORCH_PLAN_REMEDIES_H_
#define BACKFOLD_TORCH_PLAN_REMEDIES_H_

#include <cstdint>
#include <optional>

#include "torch/plan/bundles.h"
#include "torch/plan/plan.h"

namespace backfold::torch_layer {

// Enough for one width of so many bits everywhere, beside what is marked already; none where all
// that there are is not enough.
std::optional<Remedies> remedies_for_width(SiteTable& sites, const StepReference& reference,
                                           const Target& target, std::int64_t step,
                                           const Marked& marked, int width);
Remedies all_remedies(SiteTable& sites, const StepReference& reference, const Target& target,
                      std::int64_t step);

// As much of the margin as leaves a plan possible.
std::int64_t possible_margin(SiteTable& sites, const StepReference& reference, const Target& target,
                             std::int64_t step);

// Enough for a plan with no more error than `most`, or where there is none, for any plan. Raises
// ValueError where there is none either.
Remedies remedies_for_plan(SiteTable& sites, const StepReference& reference, const Target& target,
                           std::int64_t step, std::optional<double> most);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PLAN_REMEDIES_H_
