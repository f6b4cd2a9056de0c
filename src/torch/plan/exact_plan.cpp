// SPDX-License-Identifier: Apache-2.0

#include "torch/plan/exact_plan.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "torch/plan/limits.h"
#include "torch/plan/moments.h"
#include "torch/plan/sending.h"
#include "torch/plan/wording.h"

namespace backfold::torch_layer {
namespace {

// Names the sites that hold most, but for those that are marked.
std::string largest_but(const SiteTable& sites, const Marked& marked, std::int64_t step) {
  std::vector<SiteBytes> rest;
  for (const Site& site : sites.sites())
    if (site.ledger.step == step && site.ledger.held_bytes > 0 && !marked.contains(&site) &&
        site.ledger.kind != Kind::kParameter)
      rest.emplace_back(&site, site.ledger.held_bytes);
  return largest_of(std::move(rest));
}

Marked marked_by(const std::vector<RemakingUnit>& units) {
  Marked marked;
  for (const RemakingUnit& unit : units) marked.insert(unit.sites.begin(), unit.sites.end());
  return marked;
}

// The first places that make up so many bytes, if they leave beside what is marked; all places
// where they make up less.
Remedies with_sent(const SiteTable& sites, const Marked& marked, std::int64_t bytes,
                   std::int64_t step) {
  Remedies remedies{.marked = marked};
  for (const Site* site : sendable(sites, step)) {
    if (bytes <= 0) break;
    const std::int64_t leaving = exact_leaving(*site, marked, step);
    if (leaving == 0) continue;
    remedies.sent.insert(site);
    bytes -= leaving;
  }
  return remedies;
}

bool may_send(const StepReference& reference, const Target& target) {
  return target.kind == Target::Kind::kBudget && reference.ms_per_sent_byte;
}

std::int64_t can_leave(const SiteTable& sites, const Marked& marked, std::int64_t step) {
  constexpr std::int64_t kAll = std::numeric_limits<std::int64_t>::max();
  return exact_leaving(sites, with_sent(sites, marked, kAll, step), step);
}

// What is held if everything that `allowed` permits is made again, and everything leaves that can.
std::int64_t least_held(SiteTable& sites, const StepReference& reference, const Target& target,
                        std::int64_t allowed, std::int64_t step) {
  const auto order = remaking_order(sites, 0, most_on_the_way(reference, allowed));
  const auto held = reference.fixed_bytes - static_cast<std::int64_t>(spared_by(order));
  return held - (may_send(reference, target) ? can_leave(sites, marked_by(order), step) : 0);
}

[[noreturn]] void refuse(SiteTable& sites, const StepReference& reference, const Target& target,
                         std::int64_t missing, const Marked& tried, std::int64_t step) {
  if (has_moments(reference, target)) {
    const std::string rest = largest_but(sites, tried, step);
    const auto lowest = static_cast<std::int64_t>(target.value) + missing;
    TORCH_CHECK_VALUE(false, "peak=", static_cast<std::int64_t>(target.value),
                      " bytes cannot be kept with bits=None: the lowest possible is ", lowest,
                      " bytes, because ", mebibytes(lowest),
                      " are taken at once even if all products run again that can be",
                      rest.empty() ? "" : ", most of what is held by ", rest,
                      "; a peak without bits=None rounds them");
  }
  const std::int64_t allowed = allowed_by(reference, target);
  // More may be made on the way to a tensor where more may be held: the least that can be met.
  std::int64_t low = allowed, high = reference.fixed_bytes;
  while (high - low > 1 + high / 1000) {
    const std::int64_t middle = low + (high - low) / 2;
    (least_held(sites, reference, target, middle, step) <= middle ? high : low) = middle;
  }
  const Marked marked = marked_by(remaking_order(sites, 0, most_on_the_way(reference, high)));
  const std::string rest = largest_but(sites, marked, step);
  const std::string why = std::string(" are held even if all products run again that can be") +
                          (may_send(reference, target) ? " and all leaves that can" : "") +
                          (rest.empty() ? "" : ", most of it by " + rest);
  if (target.kind == Target::Kind::kRatio)
    TORCH_CHECK_VALUE(false, "ratio=", target.value,
                      " cannot be reached with bits=None: the highest possible is ",
                      static_cast<double>(reference.unique_bytes) / static_cast<double>(high),
                      ", because ", mebibytes(high), why);
  TORCH_CHECK_VALUE(false, "budget=", static_cast<std::int64_t>(target.value),
                    " bytes cannot be met with bits=None: the lowest possible is ", high,
                    " bytes, because ", mebibytes(high), why,
                    "; a budget without bits=None rounds them");
}

// By how much exact tensors exceed a target if products make again what is marked.
Limits::Excess excess_with(const SiteTable& sites, const StepReference& reference,
                           const Target& target, const Marked& marked) {
  if (has_moments(reference, target))
    return Limits(std::vector<Bundle>(), left_for_packets(sites, reference, target, marked))
        .excess({});
  const std::int64_t held = reference.fixed_bytes - exact_bytes(sites, marked);
  return {held - allowed_by(reference, target), 0};
}

// Whether marking it lowers what is taken at that moment.
bool is_there(const RemakingUnit& unit, int moment) {
  return std::any_of(unit.sites.begin(), unit.sites.end(), [&](const Site* site) {
    return site->stay.from <= moment && moment < site->stay.until;
  });
}

}  // namespace

RemadePlan plan_exactly(SiteTable& sites, const StepReference& reference, const Target& target,
                        std::int64_t step) {
  const bool peak = has_moments(reference, target);
  Marked marked;
  const auto excess = [&] { return excess_with(sites, reference, target, marked); };
  std::vector<RemakingUnit> chosen;
  Limits::Excess missing = excess();
  std::vector<RemakingUnit> order =
      remaking_order(sites, 0, most_on_the_way(reference, allowed_by(reference, target)));
  const auto is_sent = [&](const RemakingUnit* next) {  // what is still missing
    const bool dearer = !next || next->ms > *reference.ms_per_sent_byte * next->spared;
    return dearer && can_leave(sites, marked, step) >= missing.bytes;
  };
  std::int64_t sent = 0;
  while (missing.bytes > 0) {
    const auto next = std::find_if(order.begin(), order.end(), [&](const RemakingUnit& unit) {
      return !peak || is_there(unit, missing.moment);
    });
    if (may_send(reference, target) && is_sent(next == order.end() ? nullptr : &*next)) {
      sent = std::exchange(missing.bytes, 0);
      break;
    }
    if (next == order.end()) break;
    marked.insert(next->sites.begin(), next->sites.end());
    chosen.push_back(std::move(*next));
    order.erase(next);
    missing = excess();
  }
  if (missing.bytes > 0 && reference.margin > 0) {  // which counts as far as a plan is possible
    StepReference less = reference;
    less.margin = std::max<std::int64_t>(0, reference.margin - missing.bytes);
    return plan_exactly(sites, less, target, step);
  }
  if (missing.bytes > 0) refuse(sites, reference, target, missing.bytes, marked, step);
  // The last one may have spared more than was missing: what takes longest and is not needed stays.
  std::sort(chosen.begin(), chosen.end(), [](const RemakingUnit& a, const RemakingUnit& b) {
    return a.ms > b.ms || (a.ms == b.ms && a.sites[0]->name < b.sites[0]->name);
  });
  for (const RemakingUnit& unit : chosen) {
    for (const Site* site : unit.sites) marked.erase(site);
    if (excess().bytes > sent) marked.insert(unit.sites.begin(), unit.sites.end());
  }
  for (Site& site : sites.sites()) site.remade = marked.contains(&site);
  send(sites, with_sent(sites, marked, excess().bytes, step).sent);
  return plan_in_force(sites, reference, step);
}

bool is_kept(const SiteTable& sites, const StepReference& reference, const Target& target,
             std::int64_t step) {
  const Remedies remedies = remedies_now(sites, target);
  const std::int64_t leaving = exact_leaving(sites, remedies, step);
  return excess_with(sites, reference, target, remedies.marked).bytes <= leaving;
}

RemadePlan plan_in_force(const SiteTable& sites, const StepReference& reference,
                         std::int64_t step) {
  const Remedies remedies = remedies_now(sites, {.kind = Target::Kind::kBudget});
  const std::int64_t leaving = exact_leaving(sites, remedies, step);
  RemadePlan plan =
      remade_by(sites, reference.fixed_bytes - exact_bytes(sites, remedies.marked) - leaving);
  plan.sent_bytes = leaving;
  return plan;
}

}  // namespace backfold::torch_layer
