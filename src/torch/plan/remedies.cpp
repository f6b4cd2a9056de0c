// SPDX-License-Identifier: Apache-2.0

#include "torch/plan/remedies.h"

#include <algorithm>
#include <functional>
#include <vector>

#include "torch/plan/refusal.h"
#include "torch/plan/remaking.h"
#include "torch/plan/sending.h"
#include "torch/plan/solve.h"

namespace backfold::torch_layer {
namespace {

class RemedyList {
 public:
  RemedyList(SiteTable& sites, const StepReference& reference, const Target& target,
             std::int64_t step)
      : products_(units_for(sites, reference, target, step)) {
    for (const RemakingUnit& unit : products_)
      steps_.push_back({&unit, nullptr, unit.spared > 0 ? unit.ms / unit.spared : 0});
    if (target.kind == Target::Kind::kBudget && reference.ms_per_sent_byte)
      for (const Site* site : sendable(sites, step))
        steps_.push_back({nullptr, site, *reference.ms_per_sent_byte});
    // Products are in their order already, and so are places.
    std::stable_sort(steps_.begin(), steps_.end(),
                     [](const Step& a, const Step& b) { return a.ms_per_byte < b.ms_per_byte; });
  }

  Remedies first(std::size_t count) const {
    Remedies remedies;
    for (std::size_t i = 0; i < count; ++i) {
      const Step& step = steps_[i];
      if (step.leaves)
        remedies.sent.insert(step.leaves);
      else
        remedies.marked.insert(step.product->sites.begin(), step.product->sites.end());
    }
    return remedies;
  }
  Remedies all() const { return first(steps_.size()); }

  // As few as work, where more than what works does as well. None if all of them do not.
  std::optional<Remedies> fewest(const std::function<bool(const Remedies&)>& works) const {
    if (works({})) return Remedies{};
    if (steps_.empty() || !works(all())) return std::nullopt;
    std::size_t low = 0, high = steps_.size();  // does not work, works
    while (high - low > 1) {
      const std::size_t middle = (low + high) / 2;
      (works(first(middle)) ? high : low) = middle;
    }
    return first(high);
  }

 private:
  struct Step {  // one or the other
    const RemakingUnit* product = nullptr;
    const Site* leaves = nullptr;
    double ms_per_byte = 0;
  };
  const std::vector<RemakingUnit> products_;
  std::vector<Step> steps_;
};

}  // namespace

std::optional<Remedies> remedies_for_width(SiteTable& sites, const StepReference& reference,
                                           const Target& target, std::int64_t step,
                                           const Marked& marked, int width) {
  const auto beside = [&](Remedies remedies) {
    remedies.marked.insert(marked.begin(), marked.end());
    return remedies;
  };
  const auto found =
      RemedyList(sites, reference, target, step).fewest([&](const Remedies& remedies) {
        return widest_uniform(sites, reference, target, step, beside(remedies)).width >= width;
      });
  return found ? std::optional(beside(*found)) : std::nullopt;
}

Remedies all_remedies(SiteTable& sites, const StepReference& reference, const Target& target,
                      std::int64_t step) {
  return RemedyList(sites, reference, target, step).all();
}

std::int64_t possible_margin(SiteTable& sites, const StepReference& reference, const Target& target,
                             std::int64_t step) {
  if (reference.margin <= 0) return reference.margin;
  const Remedies remedies = all_remedies(sites, reference, target, step);
  Least least;
  if (solve(sites, reference, target, step, remedies, {}, 1, &least)) return reference.margin;
  return std::max<std::int64_t>(0, reference.margin - least.excess.bytes);
}

Remedies remedies_for_plan(SiteTable& sites, const StepReference& reference, const Target& target,
                           std::int64_t step, std::optional<double> most) {
  const RemedyList list(sites, reference, target, step);
  Least least;
  for (const bool exactly : {true, false}) {
    const auto works = [&](const Remedies& remedies) {
      const auto solution = solve(sites, reference, target, step, remedies, {}, 1, &least);
      return solution && (!exactly || !most || solution->error <= *most);
    };
    if (const auto remedies = list.fewest(works)) return *remedies;
  }
  refuse(sites, reference, target, least, step);
}

}  // namespace backfold::torch_layer
