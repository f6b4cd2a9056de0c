// SPDX-License-Identifier: Apache-2.0
//
// What bundles may take together, and a choice among their options that keeps to it.
//
// A budget is one limit for all of them. A peak is one for every moment of a step, and each limit
// is for the bundles that are there at its moment: what is read first in backward is in few, what
// the first layers saved in most of them.

#ifndef BACKFOLD_TORCH_PLAN_LIMITS_H_
#define BACKFOLD_TORCH_PLAN_LIMITS_H_

#include <cstdint>
#include <optional>
#include <set>
#include <vector>

#include "backfold/planner.h"
#include "torch/plan/bundles.h"

namespace backfold::torch_layer {

class Limits {
 public:
  // One for all of `count` bundles.
  Limits(std::size_t count, std::int64_t allowed);
  // `left` is what the bundles that are there may take, by moment. Those of `unfolded` take nothing
  // more once they are read: a packet's reader would be given as much.
  Limits(const std::vector<Bundle>& bundles, std::vector<std::int64_t> left,
         const std::set<const Site*>& unfolded = {});

  // By how much so many bytes per bundle exceed the limit that they exceed most, or, if they exceed
  // none, how little remains: not positive then.
  struct Excess {
    std::int64_t bytes = 0;
    int moment = 0;
  };
  Excess excess(const std::vector<std::int64_t>& bytes) const;

  // The option of each bundle, with the least error that keeps to all limits. None if the smallest
  // options do not keep to them. With several limits the one that is exceeded most without it is
  // met first, by the bundles that are there, and the others share what is left.
  std::optional<std::vector<int>> choose(const std::vector<PlanSite>& menus) const;

 private:
  struct Span {
    int from = 0, until = 0;
  };
  using Items = std::vector<std::size_t>;

  bool is_there(std::size_t bundle, std::size_t moment) const;
  // What bundles of so many bytes take together, by moment.
  std::vector<std::int64_t> sums(const std::vector<std::int64_t>& bytes) const;
  bool share(const std::vector<PlanSite>& menus, const Items& items, std::int64_t together,
             const std::vector<std::int64_t>& left, std::vector<int>& choice) const;

  std::vector<Span> spans_;         // of bundles
  std::vector<std::int64_t> left_;  // by moment
};

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PLAN_LIMITS_H_
