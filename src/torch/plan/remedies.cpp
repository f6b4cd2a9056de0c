// SPDX-License-Identifier: Apache-2.0

#include "torch/plan/remedies.h"

#include <algorithm>
#include <functional>
#include <vector>

#include "torch/plan/moments.h"
#include "torch/plan/refusal.h"
#include "torch/plan/remaking.h"
#include "torch/plan/sending.h"

namespace backfold::torch_layer {
namespace {

// How finely it is found out how many bytes have to leave.
constexpr std::int64_t kSendings = 64;

class RemedyList {
 public:
  // At most `sendable` bytes leave; none where the reference has no time for them.
  RemedyList(const std::vector<RemakingUnit>& products, const StepReference& reference,
             std::int64_t sendable) {
    for (const RemakingUnit& unit : products)
      steps_.push_back({&unit, 0, unit.spared > 0 ? unit.ms / unit.spared : 0});
    if (reference.ms_per_sent_byte && sendable > 0)
      for (std::int64_t i = 1; i <= kSendings; ++i)
        steps_.push_back({nullptr, sendable * i / kSendings - sendable * (i - 1) / kSendings,
                          *reference.ms_per_sent_byte});
    // Products are in their order already.
    std::stable_sort(steps_.begin(), steps_.end(),
                     [](const Step& a, const Step& b) { return a.ms_per_byte < b.ms_per_byte; });
  }

  Remedies first(std::size_t count) const {
    Remedies remedies;
    for (std::size_t i = 0; i < count; ++i) {
      const Step& step = steps_[i];
      remedies.sent_bytes += step.bytes;
      if (step.product)
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
  struct Step {
    const RemakingUnit* product = nullptr;  // null: so many bytes leave
    std::int64_t bytes = 0;
    double ms_per_byte = 0;
  };
  std::vector<Step> steps_;
};

// What could leave at about so many bits.
std::int64_t sendable_at(SiteTable& sites, const Target& target, const Marked& marked,
                         std::int64_t step, int width) {
  Sendable sendable(sites, marked, step);
  sendable.add(target, bundles_of(sites, step, marked), width);
  return sendable.bytes();
}

}  // namespace

StepReference with_sent(StepReference reference, std::int64_t bytes) {
  reference.sent_bytes = bytes;
  return reference;
}

std::int64_t held_by(const SiteTable& sites, const StepReference& reference, const Marked& marked,
                     const Solution& solution) {
  std::int64_t bytes = reference.fixed_bytes - exact_bytes(sites, marked);
  for (const Option& option : solution.options) bytes += option.bytes;
  return bytes;
}

Remedies remedies_for_width(SiteTable& sites, const StepReference& reference, const Target& target,
                            std::int64_t step, const Marked& marked, int width) {
  const std::vector<RemakingUnit> units = units_for(sites, reference, target, step);
  const RemedyList list(units, reference, sendable_at(sites, target, marked, step, width));
  const auto beside = [&](Remedies remedies) {
    remedies.marked.insert(marked.begin(), marked.end());
    return remedies;
  };
  const auto works = [&](const Remedies& some) {
    const Remedies remedies = beside(some);
    const StepReference with = with_sent(reference, remedies.sent_bytes);
    return widest_uniform(sites, with, target, step, remedies.marked).width >= width;
  };
  const auto found = list.fewest(works);
  Remedies remedies = beside(found.value_or(list.all()));
  remedies.enough = found.has_value();
  return remedies;
}

Remedies remedies_for_plan(SiteTable& sites, const StepReference& reference, const Target& target,
                           std::int64_t step, std::optional<double> most) {
  const std::vector<RemakingUnit> units = units_for(sites, reference, target, step);
  struct Try {
    int width;  // of what leaves, about: more bits are worth no time
    bool exactly;
  };
  Least least;
  std::int64_t sent = 0;
  for (const Try one : {Try{8, true}, Try{8, false}, Try{1, false}}) {
    const RemedyList list(units, reference, sendable_at(sites, target, {}, step, one.width));
    const auto works = [&](const Remedies& remedies) {
      const StepReference with = with_sent(reference, remedies.sent_bytes);
      const auto solution = solve(sites, with, target, step, remedies.marked, {}, 1, &least);
      if (!solution || (one.exactly && most && solution->error > *most)) return false;
      if (remedies.sent_bytes == 0) return true;
      Sendable sendable(sites, remedies.marked, step);
      sendable.add(*solution);  // some may be in packets too small for it
      return held_by(sites, with, remedies.marked, *solution) - sendable.bytes() <=
             headroom(with, target);
    };
    if (const auto remedies = list.fewest(works)) return *remedies;
    sent = list.all().sent_bytes;
  }
  refuse(sites, with_sent(reference, sent), target, least, step);
}

}  // namespace backfold::torch_layer
