// SPDX-License-Identifier: Apache-2.0
//
// What a step takes besides what a plan decides on, from moment to moment.
//
// A target of the peak bounds the sum of three things at every moment of a step: packets, whose
// bytes the plan chooses, for as long as each is there; tensors that products could make again; and
// the rest, which was measured. On a GPU that is all that torch has allocated: parameters,
// gradients, the optimizer's state, what operators need while they run. A CPU does not count
// allocations: there it is what is held exactly and what is made for the node that runs.

#ifndef BACKFOLD_TORCH_PLAN_MOMENTS_H_
#define BACKFOLD_TORCH_PLAN_MOMENTS_H_

#include <cstdint>
#include <vector>

#include "torch/capture/site.h"
#include "torch/plan/bundles.h"
#include "torch/plan/plan.h"
#include "torch/timeline.h"

namespace backfold::torch_layer {

// Writes what a watched step took to the reference, and to each site from which moment to which its
// tensors are there. Moments at which others take as much of the same tensors are left out.
void note_moments(SiteTable& sites, const Timeline::Watched& watched, StepReference& reference);

// Whether a target of the peak knows of its moments; one that does not is kept like a budget.
bool has_moments(const StepReference& reference, const Target& target);

// What a target of bytes leaves for all that is held at once, but for what is fixed.
std::int64_t headroom(const StepReference& reference, const Target& target);

// By moment: what bundles may take together if products make again what is marked.
std::vector<std::int64_t> left_for_packets(const SiteTable& sites, const StepReference& reference,
                                           const Target& target, const Marked& marked);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PLAN_MOMENTS_H_
