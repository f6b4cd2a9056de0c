// SPDX-License-Identifier: Apache-2.0
//
// Widths for the samples of tensors kept with per_sample=True.
//
// The error of sample n of tensor l at b bits is k_l * score_nl / (2^b - 1)^2. Scores are sums of
// squared ranges; k_l is the error that a probe measured for the tensor at one width / the sum of
// its scores. Widths are allotted over all samples of all tensors at once. A tensor is told only
// how many of its samples get each width; which ones is decided by rank when it is packed.

#ifndef BACKFOLD_TORCH_PLAN_SAMPLE_PLAN_H_
#define BACKFOLD_TORCH_PLAN_SAMPLE_PLAN_H_

#include "torch/capture/site.h"
#include "torch/codec/policy.h"

namespace backfold::torch_layer {

// Writes shares to the sites of all rules with per_sample, from the scores of their last packets
// and their tables. Sites that lack either keep their shares. Returns whether each such rule found
// scores.
bool plan_samples(SiteTable& sites, const Policy& policy);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PLAN_SAMPLE_PLAN_H_
