// SPDX-License-Identifier: Apache-2.0
//
// The noise that folding adds, relative to the gradient's own variance from step to step.

#ifndef BACKFOLD_TORCH_PLAN_NOISE_H_
#define BACKFOLD_TORCH_PLAN_NOISE_H_

#include <optional>
#include <string>
#include <vector>

#include "torch/plan/plan.h"

namespace backfold::torch_layer {

struct Noise {
  double ratio = 0;                // error of the plan / variance of the gradient
  std::vector<std::string> sites;  // that add most, the worst first; empty if the ratio is fine
  std::optional<double> needed;    // value of the target that brings the ratio down to a tenth
};

// `error` is what the plan expects. `variance` is that of the gradients seen, which already contain
// the error. None if the gradient has no variance of its own.
std::optional<Noise> noise_of_plan(const SiteTable& sites, const StepReference& reference,
                                   const Target& target, std::int64_t step, double error,
                                   double variance);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PLAN_NOISE_H_
