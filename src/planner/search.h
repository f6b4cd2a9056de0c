// SPDX-License-Identifier: Apache-2.0
//
// The planner's second half: from a plan on the hulls to one that uses the rest of the budget.

#ifndef BACKFOLD_PLANNER_SEARCH_H_
#define BACKFOLD_PLANNER_SEARCH_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace backfold::core {

// An option that no other option of its site dominates.
struct Candidate {
  std::int64_t bytes = 0;
  double error = 0;
  int option = 0;
};

// The candidates of all sites, one site after the other; bytes rise and errors fall within a site.
struct Menu {
  std::vector<Candidate> candidates;
  std::vector<std::size_t> first = {0};  // of each site, and the end

  std::size_t sites() const { return first.size() - 1; }
  std::span<const Candidate> of(std::size_t site) const {
    return std::span(candidates).subspan(first[site], first[site + 1] - first[site]);
  }
};

// From one hull vertex of a site to the next.
struct HullStep {
  std::size_t site = 0;
  int from = 0, to = 0;  // indices into the site's candidates
  std::int64_t bytes = 0;
  double saved = 0;  // error
  double slope = 0;  // error saved per byte
};

// Where the hulls' path stops: steps before `split` are taken, and that one no longer fits.
struct Stop {
  std::span<const HullStep> steps;  // of all sites, by falling slope
  std::size_t split = 0;
  std::int64_t bytes = 0;  // of the steps taken and the smallest candidates
};

// Improves `choice`, per site an index into its candidates and on entry the plan at the stop,
// within `budget`. Returns whether the result is proven to be optimal.
//
// Which plans are compared depends on the stop alone; the budget only picks among them. That, and
// that the plan at a stop is optimal for its own bytes, makes the error fall with the budget.
bool improve(const Menu& menu, const Stop& stop, std::int64_t budget, std::vector<int>& choice);

}  // namespace backfold::core

#endif  // BACKFOLD_PLANNER_SEARCH_H_
