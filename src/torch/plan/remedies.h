// SPDX-License-Identifier: Apache-2.0
//
// What brings a plan's bytes down where widths alone do not: products that run again, and bytes
// that leave the device. Those that take least time for a byte come first, and no more of them than
// are enough.

#ifndef BACKFOLD_TORCH_PLAN_REMEDIES_H_
#define BACKFOLD_TORCH_PLAN_REMEDIES_H_

#include <cstdint>
#include <optional>

#include "torch/plan/bundles.h"
#include "torch/plan/plan.h"
#include "torch/plan/solve.h"

namespace backfold::torch_layer {

struct Remedies {
  Marked marked;
  std::int64_t sent_bytes = 0;
  bool enough = true;
};

// The reference of a step in which so many bytes leave.
StepReference with_sent(StepReference reference, std::int64_t bytes);

// Bytes that a plan holds, wherever they are.
std::int64_t held_by(const SiteTable& sites, const StepReference& reference, const Marked& marked,
                     const Solution& solution);

// Enough for one width of so many bits everywhere, beside what is marked already; or all that there
// are, which is not `enough`.
Remedies remedies_for_width(SiteTable& sites, const StepReference& reference, const Target& target,
                            std::int64_t step, const Marked& marked, int width);

// Enough for a plan with no more error than `most`, or where there is none, for any plan. Raises
// ValueError where there is none either.
Remedies remedies_for_plan(SiteTable& sites, const StepReference& reference, const Target& target,
                           std::int64_t step, std::optional<double> most);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PLAN_REMEDIES_H_
