// SPDX-License-Identifier: Apache-2.0
//
// Which tensors are made again by running products: matrix products, convolutions, attention.
//
// That takes time, so it is done for a number of bytes only, and for those tensors that take least
// time for their bytes. Each is made once for all its readers, when the first of them asks, and
// kept until the last has asked: their times add up. A tensor may be made from others that are made
// again. What all of these take at once, on the way to the tensor that needs most, is bounded: else
// the first read of backward would bring back all that was spared.

#ifndef BACKFOLD_TORCH_PLAN_REMAKING_H_
#define BACKFOLD_TORCH_PLAN_REMAKING_H_

#include <cstdint>
#include <vector>

#include "backfold/report.h"
#include "torch/capture/site.h"
#include "torch/plan/bundles.h"
#include "torch/plan/plan.h"

namespace backfold::torch_layer {

using RemadePlan = ReportRemade;

// Sites that are marked together, as they are made by the same product.
struct RemakingUnit {
  std::vector<Site*> sites;  // first savers
  double spared = 0;         // bytes that are not held if it is marked
  double ms = 0;
};

// What could be marked, in the order in which it should be. `bits` is about what codes of rounded
// tensors take; `most` bounds the bytes that are made on the way to one tensor.
std::vector<RemakingUnit> remaking_order(SiteTable& sites, int bits, std::int64_t most);
// The same for a plan that rounds to a target of bytes.
std::vector<RemakingUnit> units_for(SiteTable& sites, const StepReference& reference,
                                    const Target& target, std::int64_t step);

// Bytes that a target allows to be held at once; that may be made on the way to one tensor then;
// and that units spare.
std::int64_t allowed_by(const StepReference& reference, const Target& target);
std::int64_t most_on_the_way(const StepReference& reference, std::int64_t allowed);
double spared_by(const std::vector<RemakingUnit>& units);

// Bytes of marked tensors that would be held unrounded. StepReference::fixed_bytes counts them.
std::int64_t exact_bytes(const SiteTable& sites, const Marked& marked);

// Bytes that are made on the way to a marked site's tensor, itself among them.
std::int64_t made_on_the_way(const Site& site, const Marked& marked);

// Waits for the laps that a step has begun. What earlier steps said is forgotten.
void read_laps(SiteTable& sites, std::int64_t step);

// What the marks in force amount to.
RemadePlan remade_by(const SiteTable& sites, std::int64_t held_bytes);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PLAN_REMAKING_H_
