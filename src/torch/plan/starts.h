// SPDX-License-Identifier: Apache-2.0
//
// The widths that are safe for what checkpoints start again from.
//
// A segment that runs again from a rounded tensor makes every one of its activations, and every
// comparison, from it. Other tensors are rounded to whatever the target leaves them; these are
// not.

#ifndef BACKFOLD_TORCH_PLAN_STARTS_H_
#define BACKFOLD_TORCH_PLAN_STARTS_H_

#include <optional>

#include "torch/capture/site.h"
#include "torch/plan/plan.h"

namespace backfold::torch_layer {

// Sets Site::safe from the tables: the narrowest width at which all starts together, each in
// proportion to its elements, bring the gradient an error of at most 0.02 of its norm, where the
// target is a mean width. A ratio or a budget counts bytes, and weighs starts like all others.
// `energy` is that of the gradient; without it no width is known to be safe.
void set_safe_widths(SiteTable& sites, const Target& target, std::optional<double> energy);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PLAN_STARTS_H_
