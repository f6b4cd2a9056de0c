// SPDX-License-Identifier: Apache-2.0
//
// What is said of a target that no plan meets.

#ifndef BACKFOLD_TORCH_PLAN_REFUSAL_H_
#define BACKFOLD_TORCH_PLAN_REFUSAL_H_

#include <cstdint>
#include <string>
#include <vector>

#include "torch/plan/bundles.h"
#include "torch/plan/limits.h"
#include "torch/plan/plan.h"

namespace backfold::torch_layer {

// What bundles take at the fewest bits that are allowed.
struct Least {
  std::int64_t bytes = 0;
  Limits::Excess excess;
  std::string largest;  // of them, where they exceed a peak most
};

// Names the bundles that take most of so many bytes each at a moment.
std::string largest_at(int moment, const std::vector<Bundle>& bundles,
                       const std::vector<std::int64_t>& bytes);

// Raises ValueError.
[[noreturn]] void refuse(const SiteTable& sites, const StepReference& reference,
                         const Target& target, const Least& least, std::int64_t step);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PLAN_REFUSAL_H_
