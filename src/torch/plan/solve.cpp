// SPDX-License-Identifier: Apache-2.0

#include "torch/plan/solve.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "backfold/planner.h"
#include "torch/plan/moments.h"
#include "torch/plan/remaking.h"
#include "torch/plan/sending.h"

namespace backfold::torch_layer {
namespace {

// Tensors of 1 bit do more harm than the error of a single step tells: plans that weigh it by 16
// train better at the same bytes (docs/plans.md).
constexpr double kWeightOfOneBit = 16;

// What all bundles may take: `allowed` of what a target counts, or at every moment of a peak.
Limits limits_of(const SiteTable& sites, const StepReference& reference, const Target& target,
                 const Marked& marked, const std::vector<Bundle>& bundles, std::int64_t allowed,
                 const Unfolded& unfolded) {
  if (!has_moments(reference, target)) return {bundles.size(), allowed};
  return {bundles, left_for_packets(sites, reference, target, marked), unfolded};
}

bool is_unfolded(const Bundle& bundle) {
  return bundle.root->choice && bundle.root->choice->bits == kRawBits;
}

}  // namespace

Unfolded not_worth_a_packet(const SiteTable& sites, const StepReference& reference,
                            const Target& target, const Marked& marked,
                            const std::vector<Bundle>& bundles) {
  Unfolded unfolded;
  if (!has_moments(reference, target)) return unfolded;
  const std::vector<std::int64_t> left = left_for_packets(sites, reference, target, marked);
  std::vector<std::int64_t> least;
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < bundles.size(); ++i) {
    const Bundle& bundle = bundles[i];
    least.push_back(
        bytes_at(bundle.root->reference, width_from(target, bundle, 1), bundle.grouping()));
    if (bundle.riders.empty() && !bundle.raw && !bundle.starts &&
        bundle.root->stay.read != Site::Stay::kAlways)
      order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return bundles[a].root->stay.read < bundles[b].root->stay.read;
  });
  std::int64_t lowest = Limits(bundles, left).excess(least).bytes;
  for (const std::size_t i : order) {
    std::vector<std::int64_t> bytes = least;
    bytes[i] = bytes_at(bundles[i].root->reference, kRawBits, {});
    unfolded.insert(bundles[i].root);
    const std::int64_t excess = Limits(bundles, left, unfolded).excess(bytes).bytes;
    if (excess > lowest) {
      unfolded.erase(bundles[i].root);
      continue;
    }
    lowest = excess;
    least = std::move(bytes);
  }
  return unfolded;
}

Uniform widest_uniform(const SiteTable& sites, const StepReference& reference, const Target& target,
                       std::int64_t step, const Remedies& remedies) {
  const Marked& marked = remedies.marked;
  const std::vector<Bundle> bundles = bundles_of(const_cast<SiteTable&>(sites), step, marked);
  const std::int64_t spared = exact_bytes(sites, marked) + exact_leaving(sites, remedies, step);
  Unfolded unfolded;
  for (const Bundle& bundle : bundles)
    if (is_unfolded(bundle)) unfolded.insert(bundle.root);
  const Limits limits = limits_of(sites, reference, target, marked, bundles,
                                  allowance(target, reference, bundles) + spared, unfolded);
  Uniform best;
  for (const int width : kCodeWidths) {
    std::vector<std::int64_t> bytes;
    for (const Bundle& bundle : bundles) {
      // What checkpoints start again from is exact until it was measured, which no target can
      // count on afterwards.
      const bool unknown = bundle.starts && !bundle.root->tried;
      const bool leaves =
          remedies.sent.contains(bundle.root) && width_to_send(target, bundle, width);
      bytes.push_back(leaves ? 0
                             : bytes_at(bundle.root->reference,
                                        is_unfolded(bundle) ? kRawBits
                                        : unknown           ? std::max(width, 4)
                                                            : width_from(target, bundle, width),
                                        {}));
    }
    const Limits::Excess excess = limits.excess(bytes);
    if (width == kCodeWidths.front())
      best.least = {std::accumulate(bytes.begin(), bytes.end(), -spared), excess,
                    largest_at(excess.moment, bundles, bytes)};
    if (excess.bytes <= 0) best.width = width;
  }
  return best;
}

std::optional<Solution> solve(SiteTable& sites, const StepReference& reference,
                              const Target& target, std::int64_t step, const Remedies& remedies,
                              const Unfolded& kept, double room, Least* least_possible) {
  const Marked& marked = remedies.marked;
  Solution solution;
  solution.bundles = bundles_of(sites, step, marked);
  solution.unfolded = not_worth_a_packet(sites, reference, target, marked, solution.bundles);
  std::vector<Bundle> open = solution.bundles;
  std::erase_if(open, [&](const Bundle& bundle) { return kept.contains(bundle.root); });
  const bool bits = target.kind == Target::Kind::kBits;
  // Where not even the fewest bits meet the target, sites without a table have those.
  const int uniform =
      bits ? widest_within(target.value)
           : std::max(1, widest_uniform(sites, reference, target, step, remedies).width);
  std::vector<PlanSite> menus;
  std::vector<std::vector<Option>> options;
  std::vector<std::int64_t> least;
  for (const Bundle& bundle : solution.bundles) {
    const int at_uniform = width_from(target, bundle, uniform);
    solution.uniform_error += bundle.error(at_uniform);
    const bool raw = kept.contains(bundle.root) || solution.unfolded.contains(bundle.root);
    options.push_back(raw ? std::vector<Option>{kept_option(target, bundle)}
                          : options_for(target, bundle, at_uniform));
    if (remedies.sent.contains(bundle.root)) have_leave(bundle, options.back());
    PlanSite menu;
    for (const Option& option : options.back())
      menu.options.push_back(
          {option.cost, (option.choice.bits == 1 ? kWeightOfOneBit : 1) * option.error});
    least.push_back(std::min_element(menu.options.begin(), menu.options.end(),
                                     [](const auto& a, const auto& b) { return a.bytes < b.bytes; })
                        ->bytes);
    menus.push_back(std::move(menu));
  }
  const std::int64_t spared =
      bits ? 0 : exact_bytes(sites, marked) + exact_leaving(sites, remedies, step);
  auto allowed = static_cast<std::int64_t>(
      room * static_cast<double>(allowance(target, reference, open) + spared));
  // If floors rule the mean out, the plan comes as close to it as they allow.
  const std::int64_t smallest = std::accumulate(least.begin(), least.end(), std::int64_t{0});
  if (bits) allowed = std::max(allowed, smallest);
  const Limits limits =
      limits_of(sites, reference, target, marked, solution.bundles, allowed, solution.unfolded);
  const auto choice = limits.choose(menus);
  if (!choice) {
    const Limits::Excess excess = limits.excess(least);
    const Least too_much{smallest - spared, excess,
                         largest_at(excess.moment, solution.bundles, least)};
    if (!least_possible) refuse(sites, reference, target, too_much, step);
    *least_possible = too_much;
    return std::nullopt;
  }
  std::vector<std::int64_t> costs;
  for (std::size_t i = 0; i < options.size(); ++i) {
    solution.options.push_back(options[i][static_cast<std::size_t>((*choice)[i])]);
    solution.error += solution.options.back().error;
    costs.push_back(solution.options.back().cost);
  }
  solution.excess = limits.excess(costs);
  return solution;
}

}  // namespace backfold::torch_layer
