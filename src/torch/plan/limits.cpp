// SPDX-License-Identifier: Apache-2.0

#include "torch/plan/limits.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>

namespace backfold::torch_layer {
namespace {

int smallest_of(const PlanSite& menu) {
  const auto least =
      std::min_element(menu.options.begin(), menu.options.end(),
                       [](const PlanOption& a, const PlanOption& b) { return a.bytes < b.bytes; });
  return static_cast<int>(least - menu.options.begin());
}

std::int64_t bytes_at(const PlanSite& menu, int option) {
  return menu.options[static_cast<std::size_t>(option)].bytes;
}

std::size_t worst_of(const std::vector<std::int64_t>& taken,
                     const std::vector<std::int64_t>& left) {
  std::size_t worst = 0;
  for (std::size_t moment = 1; moment < left.size(); ++moment)
    if (taken[moment] - left[moment] > taken[worst] - left[worst]) worst = moment;
  return worst;
}

std::int64_t largest_sum(const std::vector<PlanSite>& menus) {
  std::int64_t sum = 0;
  for (const PlanSite& menu : menus) {
    std::int64_t most = 0;
    for (const PlanOption& option : menu.options) most = std::max(most, option.bytes);
    sum += most;
  }
  return sum;
}

}  // namespace

Limits::Limits(std::size_t count, std::int64_t allowed) : spans_(count, {0, 1}), left_{allowed} {}

Limits::Limits(const std::vector<Bundle>& bundles, std::vector<std::int64_t> left,
               const std::set<const Site*>& unfolded)
    : left_(std::move(left)) {
  for (const Bundle& bundle : bundles) {
    Span span{bundle.root->stay.from, bundle.root->stay.until};
    for (const Bundle::Rider& rider : bundle.riders) {
      span.from = std::min(span.from, rider.site->stay.from);
      span.until = std::max(span.until, rider.site->stay.until);
    }
    if (unfolded.contains(bundle.root)) span.until = std::min(span.until, bundle.root->stay.read);
    spans_.push_back(span);
  }
}

bool Limits::is_there(std::size_t bundle, std::size_t moment) const {
  const auto at = static_cast<int>(moment);
  return spans_[bundle].from <= at && at < spans_[bundle].until;
}

std::vector<std::int64_t> Limits::sums(const std::vector<std::int64_t>& bytes) const {
  std::vector<std::int64_t> sums(left_.size() + 1, 0);
  const auto moment = [&](int at) { return std::min(static_cast<std::size_t>(at), left_.size()); };
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    sums[moment(spans_[i].from)] += bytes[i];
    sums[moment(spans_[i].until)] -= bytes[i];
  }
  std::partial_sum(sums.begin(), sums.end(), sums.begin());
  sums.pop_back();
  return sums;
}

Limits::Excess Limits::excess(const std::vector<std::int64_t>& bytes) const {
  const std::vector<std::int64_t> taken = sums(bytes);
  const std::size_t worst = worst_of(taken, left_);
  return {taken[worst] - left_[worst], static_cast<int>(worst)};
}

// Chooses for `items`, which take no more than `together`, and at each moment no more than `left`.
bool Limits::share(const std::vector<PlanSite>& menus, const Items& items, std::int64_t together,
                   const std::vector<std::int64_t>& left, std::vector<int>& choice) const {
  if (items.empty()) return true;
  std::vector<PlanSite> own;
  std::int64_t least = 0;
  for (const std::size_t i : items) {
    own.push_back(menus[i]);
    least += bytes_at(menus[i], smallest_of(menus[i]));
  }
  const auto chosen = [&](const Items& some) {
    std::vector<std::int64_t> bytes(menus.size(), 0);
    for (const std::size_t i : some) bytes[i] = bytes_at(menus[i], choice[i]);
    return bytes;
  };
  while (least <= together) {
    Plan plan;
    const Status status = make_plan(own, together, &plan);
    TORCH_CHECK(status.ok(), "backfold: ", status.message());
    for (std::size_t i = 0; i < items.size(); ++i) choice[items[i]] = plan.choice[i];
    const std::vector<std::int64_t> taken = sums(chosen(items));
    const std::size_t worst = worst_of(taken, left);
    if (taken[worst] <= left[worst]) return true;
    Items there, others;
    for (const std::size_t i : items) (is_there(i, worst) ? there : others).push_back(i);
    if (others.empty()) {
      together = left[worst];
      continue;
    }
    if (!share(menus, there, std::min(together, left[worst]), left, choice)) return false;
    const std::vector<std::int64_t> bytes = chosen(there), first = sums(bytes);
    std::vector<std::int64_t> rest = left;
    for (std::size_t moment = 0; moment < rest.size(); ++moment) rest[moment] -= first[moment];
    return share(menus, others, together - std::accumulate(bytes.begin(), bytes.end(), 0LL), rest,
                 choice);
  }
  return false;
}

std::optional<std::vector<int>> Limits::choose(const std::vector<PlanSite>& menus) const {
  std::vector<int> smallest;
  std::vector<std::int64_t> least;
  for (const PlanSite& menu : menus) {
    smallest.push_back(smallest_of(menu));
    least.push_back(bytes_at(menu, smallest.back()));
  }
  if (excess(least).bytes > 0) return std::nullopt;
  Items all(menus.size());
  std::iota(all.begin(), all.end(), 0);
  std::vector<int> choice = smallest;
  const std::int64_t together = left_.size() == 1 ? left_[0] : largest_sum(menus);
  if (share(menus, all, together, left_, choice)) return choice;
  // Where what is left cannot be shared so, as if everything was there all the time.
  choice = smallest;
  if (share(menus, all, *std::min_element(left_.begin(), left_.end()), left_, choice))
    return choice;
  return smallest;
}

}  // namespace backfold::torch_layer
