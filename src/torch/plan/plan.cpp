// SPDX-License-Identifier: Apache-2.0

#include "torch/plan/plan.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

#include "backfold/planner.h"
#include "torch/plan/bundles.h"
#include "torch/plan/limits.h"
#include "torch/plan/moments.h"
#include "torch/plan/remaking.h"

namespace backfold::torch_layer {
namespace {

std::string mebibytes(double bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f MiB", bytes / (1 << 20));
  return text;
}

using SiteBytes = std::pair<const Site*, std::int64_t>;

// Names the three that take most.
std::string largest_of(std::vector<SiteBytes> sites) {
  std::stable_sort(sites.begin(), sites.end(),
                   [](const SiteBytes& a, const SiteBytes& b) { return a.second > b.second; });
  std::string names;
  for (std::size_t i = 0; i < sites.size() && i < 3; ++i)
    names += (i ? ", " : "") + sites[i].first->name + " (" +
             mebibytes(static_cast<double>(sites[i].second)) + ")";
  return names;
}

// Names the sites with the largest tensors that no width can shrink.
std::string largest_fixed(const SiteTable& sites, std::int64_t step) {
  std::vector<SiteBytes> fixed;
  for (const Site& site : sites.sites())
    if (site.ledger.step == step && site.ledger.lossy.elements == 0 && site.ledger.held_bytes > 0 &&
        site.ledger.kind != Kind::kParameter)
      fixed.emplace_back(&site, site.ledger.held_bytes);
  return largest_of(std::move(fixed));
}

// What bundles take at the fewest bits that are allowed.
struct Least {
  std::int64_t bytes = 0;
  Limits::Excess excess;
  std::string largest;  // of them, where they exceed a peak most
};

// Names the bundles that take most of so many bytes each at a moment.
std::string largest_at(int moment, const std::vector<Bundle>& bundles,
                       const std::vector<std::int64_t>& bytes) {
  std::vector<SiteBytes> there;
  for (std::size_t i = 0; i < bundles.size(); ++i)
    if (bundles[i].root->stay.from <= moment && moment < bundles[i].root->stay.until)
      there.emplace_back(bundles[i].root, bytes[i]);
  return largest_of(std::move(there));
}

[[noreturn]] void refuse(const SiteTable& sites, const StepReference& reference,
                         const Target& target, const Least& least, std::int64_t step) {
  const double held = static_cast<double>(reference.fixed_bytes + least.bytes);
  if (has_moments(reference, target)) {
    const double peak = target.value + static_cast<double>(least.excess.bytes);
    const std::int64_t rest = reference.moments[static_cast<std::size_t>(least.excess.moment)];
    TORCH_CHECK_VALUE(false, "peak=", static_cast<std::int64_t>(target.value),
                      " bytes cannot be kept: the lowest possible is ",
                      static_cast<std::int64_t>(peak), " bytes (", mebibytes(peak), "), ",
                      mebibytes(static_cast<double>(rest)), " of it besides packets",
                      least.largest.empty() ? "" : ", and of what is kept most by ", least.largest);
  }
  const std::string fixed = largest_fixed(sites, step);
  const std::string holds = mebibytes(static_cast<double>(reference.fixed_bytes)) +
                            " of it in tensors that are not compressed" +
                            (fixed.empty() ? "" : ", the largest " + fixed);
  if (target.kind == Target::Kind::kRatio)
    TORCH_CHECK_VALUE(false, "ratio=", target.value, " cannot be reached: the highest possible is ",
                      static_cast<double>(reference.unique_bytes) / held, ", because ",
                      mebibytes(held), " are held even at the fewest bits, ", holds);
  TORCH_CHECK_VALUE(false, name_of(target.kind), "=", static_cast<std::int64_t>(target.value),
                    " bytes cannot be met: the lowest possible is ",
                    static_cast<std::int64_t>(held), " bytes (", mebibytes(held), "), ", holds);
}

}  // namespace

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

namespace {

using Unfolded = std::set<const Site*>;

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

// Of a peak: bundles that are not worth a packet. When they are read, which is early in backward,
// packet and decoded tensor are there together, and all the rest is still held: unfolded they
// lower the least peak that is possible, or leave it as it is.
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

struct Uniform {
  int width = 0;  // 0: none meets the target
  Least least;
};

Uniform widest_uniform(const SiteTable& sites, const StepReference& reference, const Target& target,
                       std::int64_t step, const Marked& marked) {
  const std::vector<Bundle> bundles = bundles_of(const_cast<SiteTable&>(sites), step, marked);
  const std::int64_t spared = exact_bytes(sites, marked);
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
      bytes.push_back(bytes_at(bundle.root->reference,
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

}  // namespace

bool is_known(const StepReference& reference, const Target& target) {
  return reference.saved_bytes > 0 &&
         (target.kind != Target::Kind::kPeak || !reference.moments.empty());
}

int uniform_width(const SiteTable& sites, const StepReference& reference, const Target& target,
                  std::int64_t step) {
  if (target.kind != Target::Kind::kBits && is_known(reference, target)) {
    const Uniform best = widest_uniform(sites, reference, target, step, marked_now(sites));
    if (best.width == 0) refuse(sites, reference, target, best.least, step);
  }
  return width_about(sites, reference, target, step);
}

int width_about(const SiteTable& sites, const StepReference& reference, const Target& target,
                std::int64_t step) {
  if (target.kind == Target::Kind::kBits) return widest_within(target.value);
  if (!is_known(reference, target))
    return target.kind == Target::Kind::kRatio ? widest_within(32 / target.value - 0.25) : 2;
  return std::max(1, widest_uniform(sites, reference, target, step, marked_now(sites)).width);
}

void mark_until_planned(SiteTable& sites, const StepReference& reference, const Target& target,
                        std::int64_t step) {
  if (target.kind == Target::Kind::kBits || !is_known(reference, target)) return;
  Marked marked = marked_now(sites);
  const std::vector<Bundle> bundles = bundles_of(sites, step, marked);
  const Unfolded unfolded = not_worth_a_packet(sites, reference, target, marked, bundles);
  if (has_moments(reference, target))
    for (const Bundle& bundle : bundles) {
      bundle.root->choice.reset();
      if (unfolded.contains(bundle.root)) bundle.root->choice = {kRawBits, {}};
    }
  constexpr int kEnough = 2;  // bits
  for (const RemakingUnit& unit : units_for(sites, reference, target, step)) {
    if (widest_uniform(sites, reference, target, step, marked).width >= kEnough) break;
    marked.insert(unit.sites.begin(), unit.sites.end());
  }
  for (Site& site : sites.sites()) site.remade = marked.contains(&site);
}

namespace {

// How far a plan may go beyond a target of bits or ratio before it leaves tensors unfolded. A few
// bits more for the worst of them take far less memory than those tensors do.
constexpr double kMoreRoom[] = {1.125, 1.25, 1.5, 1.75, 2};

// Tensors of 1 bit do more harm than the error of a single step tells: plans that weigh it by 16
// train better at the same bytes (docs/plans.md).
constexpr double kWeightOfOneBit = 16;

struct Solution {
  std::vector<Bundle> bundles;
  std::vector<Option> options;  // one per bundle
  double error = 0, uniform_error = 0;
  Limits::Excess excess;  // of what the options cost
  Unfolded unfolded;      // as they are not worth a packet
};

// With `room` times what the target allows. None where no plan is possible, and `least` is given:
// what bundles take at least.
std::optional<Solution> solve(SiteTable& sites, const StepReference& reference,
                              const Target& target, std::int64_t step, const Marked& marked,
                              const std::set<const Site*>& kept = {}, double room = 1,
                              Least* least_possible = nullptr) {
  Solution solution;
  solution.bundles = bundles_of(sites, step, marked);
  solution.unfolded = not_worth_a_packet(sites, reference, target, marked, solution.bundles);
  std::vector<Bundle> open = solution.bundles;
  std::erase_if(open, [&](const Bundle& bundle) { return kept.contains(bundle.root); });
  const bool bits = target.kind == Target::Kind::kBits;
  // Where not even the fewest bits meet the target, sites without a table have those.
  const int uniform =
      bits ? widest_within(target.value)
           : std::max(1, widest_uniform(sites, reference, target, step, marked).width);
  std::vector<PlanSite> menus;
  std::vector<std::vector<Option>> options;
  std::vector<std::int64_t> least;
  for (const Bundle& bundle : solution.bundles) {
    const int at_uniform = width_from(target, bundle, uniform);
    solution.uniform_error += bundle.error(at_uniform);
    const bool raw = kept.contains(bundle.root) || solution.unfolded.contains(bundle.root);
    options.push_back(raw ? std::vector<Option>{kept_option(target, bundle)}
                          : options_for(target, bundle, at_uniform));
    PlanSite menu;
    for (const Option& option : options.back())
      menu.options.push_back(
          {option.cost, (option.choice.bits == 1 ? kWeightOfOneBit : 1) * option.error});
    least.push_back(std::min_element(menu.options.begin(), menu.options.end(),
                                     [](const auto& a, const auto& b) { return a.bytes < b.bytes; })
                        ->bytes);
    menus.push_back(std::move(menu));
  }
  const std::int64_t spared = bits ? 0 : exact_bytes(sites, marked);
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

// Adds the sites with the largest errors until the rest add up to no more than `most`. False if
// that adds none.
bool keep_worst(const Solution& solution, double most, std::set<const Site*>& kept) {
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

}  // namespace

namespace {

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
  return solve(const_cast<SiteTable&>(sites), reference, target, step, marked_now(sites))->error;
}

namespace {

// The fewest marked tensors that allow a plan with no more error than `most`: of those that
// remaking_order() gives, a first part.
Marked enough_marked(SiteTable& sites, const StepReference& reference, const Target& target,
                     std::int64_t step, std::optional<double> most) {
  const std::vector<RemakingUnit> units = units_for(sites, reference, target, step);
  const auto first = [&](std::size_t count) {
    Marked marked;
    for (std::size_t i = 0; i < count; ++i)
      marked.insert(units[i].sites.begin(), units[i].sites.end());
    return marked;
  };
  Least least;
  const auto works = [&](std::size_t count, bool exactly) {
    const auto solution = solve(sites, reference, target, step, first(count), {}, 1, &least);
    return solution && (!exactly || !most || solution->error <= *most);
  };
  for (const bool exactly : {true, false}) {
    if (works(0, exactly)) return {};
    if (!works(units.size(), exactly)) continue;
    std::size_t low = 0, high = units.size();  // does not work, works
    while (high - low > 1) {
      const std::size_t middle = (low + high) / 2;
      (works(middle, exactly) ? high : low) = middle;
    }
    return first(high);
  }
  refuse(sites, reference, target, least, step);
}

}  // namespace

PlanSummary make_plan(SiteTable& sites, const StepReference& reference, const Target& target,
                      std::int64_t step, std::optional<double> most, std::optional<double> energy) {
  std::set<const Site*> kept;
  Marked marked;
  if (target.kind != Target::Kind::kBits) {
    constexpr double kPart = 0.25;
    const auto limit = energy ? std::optional(kPart * *energy) : std::nullopt;
    marked = enough_marked(sites, reference, target, step, limit);
  }
  Solution solution = *solve(sites, reference, target, step, marked);
  bool raised = false;
  for (const double room : kMoreRoom) {
    if (!most || solution.error <= *most || is_of_bytes(target) || raised) break;
    Solution roomier = *solve(sites, reference, target, step, marked, kept, room);
    raised = roomier.error <= *most;
    if (raised) solution = std::move(roomier);
  }
  while (most && solution.error > *most) {
    const std::set<const Site*> before = kept;
    if (!keep_worst(solution, *most, kept)) break;
    Least least;
    auto roomier = solve(sites, reference, target, step, marked, kept, 1, &least);
    if (!roomier) {  // bytes that nothing may exceed come first
      kept = before;
      break;
    }
    solution = std::move(*roomier);
  }
  for (Site& site : sites.sites()) site.remade = marked.contains(&site);
  PlanSummary summary{.step = step,
                      .sites = 0,
                      .held_bytes = reference.fixed_bytes - exact_bytes(sites, marked),
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
    summary.held_bytes += option.bytes;
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
