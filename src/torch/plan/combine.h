// SPDX-License-Identifier: Apache-2.0
//
// What several processes measured, each on its own part of the data, as one measurement.
//
// The processes average their gradients, each with the same weight whatever the size of its part,
// and round independently. So the error energy of the averaged gradient is the mean of the
// processes' own, divided by their number, and the variance of the averaged gradient is smaller by
// the same factor. The mean alone therefore compares with what one process sees of its gradient:
//
//   errors     mean over all processes; one where a site saves nothing adds none, and one that
//              has the site but did not measure it counts as the mean of those that did
//   energy     mean over the processes that know theirs. The averaged gradient has at least that
//              energy divided by their number, so the limit on a plan's error holds for it too
//   footprints those of the process with the largest step, as the largest step of one process is
//              what a single one plans for; sites that only others have are added with theirs
//   moments    those of the same process: of several whose steps save as much, the one that takes
//              most besides, so that all keep to the peak that the worst can keep
//   holdings   those of the same process, for what leaves; a byte takes as long for it as in the
//              process where it takes longest, and nothing leaves where one has nowhere to send it.
//              What did not all leave in one process stays in all
//   products   those that all processes can run again, as slow as where they take longest
//
// Everything here depends on the measurements alone, in the order of ranks, so that all processes
// come to the same result.

#ifndef BACKFOLD_TORCH_PLAN_COMBINE_H_
#define BACKFOLD_TORCH_PLAN_COMBINE_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "torch/capture/site.h"
#include "torch/plan/holdings.h"
#include "torch/plan/plan.h"

namespace backfold::torch_layer {

// What one process knows when a plan is made.
struct Tables {
  std::vector<SiteRecord> sites;
  StepReference reference;
  std::optional<double> gradient_energy;
  std::int64_t steps = 0;
  std::vector<Holding> holdings = {};  // of the last of these steps
};

struct Combined {
  // Sites in the order in which the process with the largest step has found them, then those that
  // others have. Errors are means over the processes that have the site, so that they can be
  // combined again: a process that measures nothing new brings them along the next time.
  Tables tables;
  std::vector<double> shares;  // of the processes that have each site

  // The errors of the averaged gradient, to plan with.
  std::vector<SiteRecord> weighted() const;
};

// `ranks` has at least one entry.
Combined combine(const std::vector<Tables>& ranks);

// Whether one step is larger than another: of steps that save the same, the one that takes more
// besides.
bool is_larger(const StepReference& one, const StepReference& other);
// How long a byte takes to leave and come back where that takes longest; none where a process has
// nowhere to send it.
std::optional<double> slowest_link(const std::vector<Tables>& ranks);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PLAN_COMBINE_H_
