// SPDX-License-Identifier: Apache-2.0
//
// Planner: which option every site gets under one budget of bytes.
//
// A site is a place that holds a tensor. Its options are the ways to hold it (raw, or a codec,
// layout and width), each with the bytes it takes and the error it is expected to add. A plan
// chooses one option for every site so that the bytes together stay within the budget and the
// errors together are least. Bounds on a site are expressed by leaving options out: an option below
// a floor is not in the list, a site that must stay raw has one option.
//
// How. An option is dominated if another one takes no more bytes for no more error; these are never
// chosen. The lower convex hull of what remains gives, per site, steps of falling error per byte.
// Taking the steps of all sites in that order is optimal at each budget that it meets exactly, and
// a straight line between two of these bounds the optimum from below. A search over the sites whose
// options lie closest to that line, hull or not, then uses the rest of the budget.
//
// What holds. The same input gives the same plan; among equal options of a site the first is taken.
// A larger budget never gives a larger error, up to the rounding of the sum. With n options in all
// the line takes O(n log n). The search takes bounded work on top, which proves the plan optimal up
// to some tens of sites and in general leaves it within 1% of its bound above that.

#ifndef BACKFOLD_PLANNER_H_
#define BACKFOLD_PLANNER_H_

#include <cstdint>
#include <span>
#include <vector>

#include "backfold/status.h"

namespace backfold {

struct PlanOption {
  std::int64_t bytes = 0;  // not negative
  double error = 0;        // finite, not negative
};

struct PlanSite {
  std::vector<PlanOption> options;  // at least one, in any order
};

struct Plan {
  std::vector<int> choice;  // per site, an index into its options
  std::int64_t bytes = 0;   // sum over the chosen options
  double error = 0;         // sum over the chosen options
  double lower_bound = 0;   // no plan within the budget has less error; equal: proven optimal
};

// Chooses an option for every site; fails where even the smallest ones exceed the budget, and then
// names the least budget that can be kept.
Status make_plan(std::span<const PlanSite> sites, std::int64_t budget, Plan* result);

}  // namespace backfold

#endif  // BACKFOLD_PLANNER_H_
