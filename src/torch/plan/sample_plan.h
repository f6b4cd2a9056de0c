// SPDX-License-Identifier: Apache-2.0
//
// Widths for the samples of tensors that are kept with per_sample=True.
//
// The error of sample n of tensor l, b bits wide, is k_l * score_nl / (2^b - 1)^2: scores are sums
// of squared ranges, k_l is what a probe measured of the tensor, at one width, by the sum of its
// scores. Widths are shared out over all samples of all tensors at once. A tensor is told only how
// many of its samples get which width; which ones is decided where it is packed, by rank.

#ifndef BACKFOLD_TORCH_PLAN_SAMPLE_PLAN_H_
#define BACKFOLD_TORCH_PLAN_SAMPLE_PLAN_H_

#include "torch/capture/site.h"
#include "torch/codec/policy.h"

namespace backfold::torch_layer {

// Writes shares to the sites of all rules with per_sample, from the scores of their last packets
// and their tables. Sites without either keep what they have. Whether each such rule found scores.
bool plan_samples(SiteTable& sites, const Policy& policy);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PLAN_SAMPLE_PLAN_H_
