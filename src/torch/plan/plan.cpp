// SPDX-License-Identifier: Apache-2.0

#include "torch/plan/plan.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "torch/plan/bundles.h"
#include "torch/plan/moments.h"
#include "torch/plan/refusal.h"
#include "torch/plan/remaking.h"
#include "torch/plan/remedies.h"
#include "torch/plan/sending.h"
#include "torch/plan/solve.h"

namespace backfold::torch_layer {

const char* name_of(Target::Kind kind) {
  switch (kind) {
    case Target::Kind::kBits:
      return "bits";
    case Target::Kind::kRatio:
      return "ratio";
    case Target::Kind::kBudget:
      return "budget";
    case Target::Kind::kPeak:
      break;
  }
  return "peak";
}

double error_at(const Sensitivity& sensitivity, int bits) {
  const auto& table = sensitivity.errors;
  if (table.empty() || bits == kRawBits) return 0;
  const auto steps = [](int width) { return std::exp2(width) - 1; };
  const auto scaled = [&](const std::pair<int, double>& entry) {
    const double ratio = steps(entry.first) / steps(bits);
    return entry.second * ratio * ratio;
  };
  if (bits <= table.front().first) return scaled(table.front());
  for (std::size_t i = 1; i < table.size(); ++i) {
    const auto& [low, at_low] = table[i - 1];
    const auto& [high, at_high] = table[i];
    if (bits > high) continue;
    if (at_low <= 0 || at_high <= 0) return std::max(at_low, at_high);
    const double along = std::log(steps(bits) / steps(low)) / std::log(steps(high) / steps(low));
    return at_low * std::pow(at_high / at_low, along);
  }
  return scaled(table.back());
}

bool is_known(const StepReference& reference, const Target& target) {
  return reference.saved_bytes > 0 &&
         (target.kind != Target::Kind::kPeak || !reference.moments.empty());
}

int uniform_width(const SiteTable& sites, const StepReference& reference, const Target& target,
                  std::int64_t step) {
  if (target.kind != Target::Kind::kBits && is_known(reference, target)) {
    const Uniform best =
        widest_uniform(sites, reference, target, step, remedies_now(sites, target));
    if (best.width == 0 && best.least.excess.bytes > reference.margin)
      refuse(sites, reference, target, best.least, step);
  }
  return width_about(sites, reference, target, step);
}

int width_about(const SiteTable& sites, const StepReference& reference, const Target& target,
                std::int64_t step) {
  if (target.kind == Target::Kind::kBits) return widest_within(target.value);
  if (!is_known(reference, target))
    return target.kind == Target::Kind::kRatio ? widest_within(32 / target.value - 0.25) : 2;
  return std::max(
      1, widest_uniform(sites, reference, target, step, remedies_now(sites, target)).width);
}

namespace {

void mark(SiteTable& sites, const Marked& marked) {
  for (Site& site : sites.sites()) site.remade = marked.contains(&site);
}

// Bits of packets that leave until there is a plan.
constexpr int kLeastSent = 4;

}  // namespace

void mark_until_planned(SiteTable& sites, const StepReference& reference, const Target& target,
                        std::int64_t step) {
  if (target.kind == Target::Kind::kBits || !is_known(reference, target)) return;
  const Marked marked = marked_now(sites);
  const std::vector<Bundle> bundles = bundles_of(sites, step, marked);
  const Unfolded unfolded = not_worth_a_packet(sites, reference, target, marked, bundles);
  if (is_of_bytes(target)) {
    for (const Bundle& bundle : bundles) {
      bundle.root->choice.reset();
      if (unfolded.contains(bundle.root)) bundle.root->choice = {kRawBits, {}};
    }
  }
  std::optional<Remedies> remedies;
  for (const int width : {2, 1})
    if (!remedies) remedies = remedies_for_width(sites, reference, target, step, marked, width);
  if (!remedies) remedies = all_remedies(sites, reference, target, step);
  mark(sites, remedies->marked);
  send(sites, remedies->sent);
  for (const Bundle& bundle : bundles_of(sites, step, remedies->marked)) {
    if (!bundle.root->sent) continue;
    if (const auto width = width_to_send(target, bundle, kLeastSent))
      bundle.root->choice = {*width, {}};
  }
}

namespace {

// How far a plan may go beyond a target of bits or ratio before it leaves tensors unfolded. A few
// bits more for the worst of them take far less memory than those tensors do.
constexpr double kMoreRoom[] = {1.125, 1.25, 1.5, 1.75, 2};

// Adds the sites with the largest errors until the rest add up to no more than `most`. False if
// that adds none.
bool keep_worst(const Solution& solution, double most, Unfolded& kept) {
  std::vector<std::size_t> order(solution.bundles.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return solution.options[a].error > solution.options[b].error;
  });
  double left = solution.error;
  const std::size_t before = kept.size();
  for (const std::size_t i : order) {
    if (left <= most || solution.options[i].error <= 0) break;
    kept.insert(solution.bundles[i].root);
    left -= solution.options[i].error;
  }
  return kept.size() > before;
}

// Where a checkpoint starts again from memory that another site has packed before, one packet of
// the wider of both widths serves both.
void share_with_earlier(Site& site) {
  Site* const earlier = std::exchange(site.beside, nullptr);
  if (!site.starts || site.root || !site.choice || !earlier || earlier->root || !earlier->choice)
    return;
  if (site.choice->bits <= 16 && earlier->choice->codec < 0)
    earlier->choice->bits = std::max(earlier->choice->bits, site.choice->bits);
}

}  // namespace

double error_for(const SiteTable& sites, const StepReference& reference, const Target& target,
                 std::int64_t step) {
  return solve(const_cast<SiteTable&>(sites), reference, target, step, remedies_now(sites, target))
      ->error;
}

PlanSummary make_plan(SiteTable& sites, StepReference reference, const Target& target,
                      std::int64_t step, std::optional<double> most, std::optional<double> energy) {
  reference.margin = possible_margin(sites, reference, target, step);
  Unfolded kept;
  Remedies remedies;
  if (target.kind != Target::Kind::kBits) {
    constexpr double kPart = 0.25;
    const auto limit = energy ? std::optional(kPart * *energy) : std::nullopt;
    remedies = remedies_for_plan(sites, reference, target, step, limit);
  }
  Solution solution = *solve(sites, reference, target, step, remedies);
  bool raised = false;
  for (const double room : kMoreRoom) {
    if (!most || solution.error <= *most || is_of_bytes(target) || raised) break;
    Solution roomier = *solve(sites, reference, target, step, remedies, kept, room);
    raised = roomier.error <= *most;
    if (raised) solution = std::move(roomier);
  }
  while (most && solution.error > *most) {
    const Unfolded before = kept;
    if (!keep_worst(solution, *most, kept)) break;
    Least least;
    auto roomier = solve(sites, reference, target, step, remedies, kept, 1, &least);
    if (!roomier) {  // bytes that nothing may exceed come first
      kept = before;
      break;
    }
    solution = std::move(*roomier);
  }
  mark(sites, remedies.marked);
  send(sites, remedies.sent);
  const std::int64_t exact_sent = exact_leaving(sites, remedies, step);
  PlanSummary summary{
      .step = step,
      .sites = 0,
      .held_bytes = reference.fixed_bytes - exact_bytes(sites, remedies.marked) - exact_sent,
      .sent_bytes = exact_sent,
      .mean_bits = 0,
      .error = solution.error,
      .uniform_error = solution.uniform_error,
      .raised = raised,
      .kept = {},
      .peak_bytes = {}};
  if (has_moments(reference, target))
    summary.peak_bytes = static_cast<std::int64_t>(target.value) + solution.excess.bytes;
  for (const Bundle& bundle : solution.bundles)
    for (const Bundle::Rider& rider : bundle.riders) rider.site->choice.reset();
  double elements = 0, bits = 0;
  for (std::size_t i = 0; i < solution.bundles.size(); ++i) {
    const Bundle& bundle = solution.bundles[i];
    const Option& option = solution.options[i];
    bundle.root->choice = option.choice;
    if (bundle.root->starts && bundle.root->sensitivity.errors.empty()) bundle.root->choice.reset();
    if (kept.contains(bundle.root)) summary.kept.push_back(bundle.root->name);
    for (const Bundle::Rider& rider : bundle.riders) {
      if (rider.site->starts && rider.sensitivity->errors.empty()) continue;
      // One that is made from several packets takes what the least of them has.
      auto& choice = rider.site->choice;
      if (!choice || option.choice.bits < choice->bits) choice = option.choice;
    }
    for (const auto& [site, choice] : option.apart) {
      site->choice = choice;
      site->tried = true;
      elements += static_cast<double>(site->reference.elements);
      bits += static_cast<double>(site->reference.elements * choice.bits);
    }
    summary.sites += bundle.measured;
    const Footprint& footprint = bundle.root->reference;
    summary.held_bytes += option.bytes - option.leaves;
    summary.sent_bytes += option.leaves;
    // What is too small to leave is not to leave.
    if (option.leaves == 0 && exact_leaving(*bundle.root, remedies.marked, step) == 0)
      bundle.root->sent = false;
    const bool counts =
        !bundle.raw && !kept.contains(bundle.root) && !solution.unfolded.contains(bundle.root);
    const auto count = counts ? static_cast<double>(footprint.elements) : 0;
    elements += count;
    bits += option.choice.codec >= 0
                ? std::max(0.0, 8 * static_cast<double>(option.bytes) - count * kHeaderBits)
            : option.choice.bits == kRawBits
                ? count * static_cast<double>(8 * footprint.element_bytes)
                : count * (bundle.starts && target.kind == Target::Kind::kBits
                               ? std::min<double>(option.choice.bits, target.value)
                               : option.choice.bits);
    bundle.root->tried = true;
  }
  summary.mean_bits = elements > 0 ? bits / elements : 0;
  for (Site& site : sites.sites()) share_with_earlier(site);
  return summary;
}

bool has_unknown_sites(const SiteTable& sites, std::int64_t step) {
  return std::any_of(sites.sites().begin(), sites.sites().end(), [step](const Site& site) {
    const bool is_lossy = site.ledger.step == step && site.ledger.lossy.elements > 0;
    return !site.root && !site.tried && (is_lossy || site.lossy_step == step);
  });
}

}  // namespace backfold::torch_layer
