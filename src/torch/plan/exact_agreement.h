// SPDX-License-Identifier: Apache-2.0
//
// One exact plan for several processes, of what each of them knows.
//
// They wait for each other in every step, so a product takes as long as in the process where it
// takes longest, and so does a byte that leaves; where one process has nowhere to send it, nothing
// leaves. What did not all leave in one of them stays in all.
//
// The process with the largest step is planned for first. Where what is marked then is not enough
// for another one, what its own plan marks is marked as well: all processes mark the same places
// and each keeps to the target. This depends on what they know alone, in the order of ranks, so
// that all of them come to the same result.

#ifndef BACKFOLD_TORCH_PLAN_EXACT_AGREEMENT_H_
#define BACKFOLD_TORCH_PLAN_EXACT_AGREEMENT_H_

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "torch/plan/combine.h"
#include "torch/plan/exact_plan.h"

namespace backfold::torch_layer {

struct ExactAgreement {
  std::set<std::string> remade, sent, stuck;  // names of sites
  std::optional<double> ms_per_sent_byte;
  RemadePlan plan;  // as it is for the process with the largest step
};

// `ranks` has at least one entry. Raises ValueError if one of them cannot keep to the target.
ExactAgreement agree_exactly(const std::vector<Tables>& ranks, const Target& target);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PLAN_EXACT_AGREEMENT_H_
