// SPDX-License-Identifier: Apache-2.0
//
// The widths that meet a target, with the least error, for remedies that are given: what
// plans are made of (plan.h). Nothing here changes a site.

#ifndef BACKFOLD_TORCH_PLAN_SOLVE_H_
#define BACKFOLD_TORCH_PLAN_SOLVE_H_

#include <cstdint>
#include <optional>
#include <set>
#include <vector>

#include "torch/plan/bundles.h"
#include "torch/plan/limits.h"
#include "torch/plan/plan.h"
#include "torch/plan/refusal.h"

namespace backfold::torch_layer {

using Unfolded = std::set<const Site*>;

// Of a peak: bundles that are not worth a packet. When they are read, which is early in backward,
// packet and decoded tensor are there together, and all the rest is still held: unfolded they
// lower the least peak that is possible, or leave it as it is.
Unfolded not_worth_a_packet(const SiteTable& sites, const StepReference& reference,
                            const Target& target, const Marked& marked,
                            const std::vector<Bundle>& bundles);

// The widest width that meets a target everywhere.
struct Uniform {
  int width = 0;  // 0: none meets the target
  Least least;
};
Uniform widest_uniform(const SiteTable& sites, const StepReference& reference, const Target& target,
                       std::int64_t step, const Remedies& remedies);

struct Solution {
  std::vector<Bundle> bundles;
  std::vector<Option> options;  // one per bundle
  double error = 0, uniform_error = 0;
  Limits::Excess excess;  // of what the options cost
  Unfolded unfolded;      // as they are not worth a packet
};

// With `room` times what the target allows, and the bundles of `kept` unfolded. None where no plan
// is possible, and `least` is given: what bundles take at least. Raises ValueError where it is not.
std::optional<Solution> solve(SiteTable& sites, const StepReference& reference,
                              const Target& target, std::int64_t step, const Remedies& remedies,
                              const Unfolded& kept = {}, double room = 1,
                              Least* least_possible = nullptr);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PLAN_SOLVE_H_
