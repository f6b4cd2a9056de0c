// SPDX-License-Identifier: Apache-2.0

#include "torch/plan/remaking.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <utility>

#include "torch/capture/lap.h"
#include "torch/plan/moments.h"

namespace backfold::torch_layer {
namespace {

// The part of what autograd alone keeps that may be made on the way to one tensor, whatever is
// held: a block of a network of eight.
constexpr std::int64_t kPartOnTheWay = 8;

void add_on_the_way(const Site& site, const Marked& marked, Marked& found) {
  const Site* first = site.first_saver;
  // One that other processes alone can make again may be marked here as well.
  if (!first || !first->remaking || !marked.contains(first) || !found.insert(first).second) return;
  for (const Site* source : first->remaking->from) add_on_the_way(*source, marked, found);
}

// Marked sites whose tensors are made on the way to a site's, itself among them.
Marked on_the_way(const Site& site, const Marked& marked) {
  Marked found;
  add_on_the_way(site, marked, found);
  return found;
}

std::int64_t bytes_of(const Marked& marked) {
  std::int64_t bytes = 0;
  for (const Site* site : marked) bytes += site->remaking->bytes;
  return bytes;
}

// Whether what is made on the way to any marked tensor that needs one of these stays within bounds.
bool stays_within(const std::vector<Site*>& added, const Marked& marked, std::int64_t most) {
  return std::all_of(marked.begin(), marked.end(), [&](const Site* site) {
    const Marked found = on_the_way(*site, marked);
    const bool concerned = std::any_of(added.begin(), added.end(),
                                       [&](const Site* one) { return found.contains(one); });
    return !concerned || bytes_of(found) <= most;
  });
}

// Sites by the product that makes them: several that one makes, in different memory, are one unit.
std::vector<RemakingUnit> units_of(SiteTable& sites, int bits) {
  std::map<std::int64_t, RemakingUnit> units;  // by the number of the product
  std::int64_t alone = 0;
  for (Site& site : sites.sites()) {
    if (!site.remaking || site.remaking->bytes == 0) continue;
    const Remaking& remaking = *site.remaking;
    RemakingUnit& unit = units[remaking.product > 0 ? remaking.product : --alone];
    unit.sites.push_back(&site);
    unit.ms = std::max(unit.ms, remaking.ms);
    const std::int64_t width = std::max<std::int64_t>(1, site.reference.element_bytes);
    unit.spared += static_cast<double>(remaking.bytes) *
                   (remaking.exact ? 1 : bits / (8.0 * static_cast<double>(width)));
  }
  std::vector<RemakingUnit> all;
  for (auto& [product, unit] : units) all.push_back(std::move(unit));
  return all;
}

using Before = bool (*)(const RemakingUnit& a, const RemakingUnit& b);

bool by_name(const RemakingUnit& a, const RemakingUnit& b) {
  return a.sites[0]->name < b.sites[0]->name;
}
bool takes_less_time(const RemakingUnit& a, const RemakingUnit& b) {
  const double left = a.ms * b.spared, right = b.ms * a.spared;
  return left < right || (left == right && by_name(a, b));
}
bool spares_more(const RemakingUnit& a, const RemakingUnit& b) {
  return a.spared > b.spared || (a.spared == b.spared && by_name(a, b));
}

std::vector<RemakingUnit> ordered(std::vector<RemakingUnit> units, Before before,
                                  std::int64_t most) {
  std::sort(units.begin(), units.end(), before);
  std::vector<RemakingUnit> order;
  Marked marked;
  for (RemakingUnit& unit : units) {
    marked.insert(unit.sites.begin(), unit.sites.end());
    if (stays_within(unit.sites, marked, most)) {
      order.push_back(std::move(unit));
    } else {
      for (const Site* site : unit.sites) marked.erase(site);
    }
  }
  return order;
}

}  // namespace

double spared_by(const std::vector<RemakingUnit>& units) {
  double spared = 0;
  for (const RemakingUnit& unit : units) spared += unit.spared;
  return spared;
}

std::int64_t most_on_the_way(const StepReference& reference, std::int64_t allowed) {
  return std::max(allowed, reference.unique_bytes / kPartOnTheWay);
}

std::int64_t allowed_by(const StepReference& reference, const Target& target) {
  if (target.kind == Target::Kind::kRatio)
    return static_cast<std::int64_t>(static_cast<double>(reference.unique_bytes) / target.value);
  return headroom(reference, target);
}

std::vector<RemakingUnit> remaking_order(SiteTable& sites, int bits, std::int64_t most) {
  // What is left out for the bound depends on the order. Where another one spares clearly more,
  // time is not what matters.
  const std::vector<RemakingUnit> units = units_of(sites, bits);
  std::vector<RemakingUnit> by_time = ordered(units, takes_less_time, most);
  std::vector<RemakingUnit> by_bytes = ordered(units, spares_more, most);
  constexpr double kClearly = 1.1;
  if (spared_by(by_bytes) <= kClearly * spared_by(by_time)) return by_time;
  std::sort(by_bytes.begin(), by_bytes.end(), takes_less_time);
  return by_bytes;
}

std::vector<RemakingUnit> units_for(SiteTable& sites, const StepReference& reference,
                                    const Target& target, std::int64_t) {
  constexpr int kAbout = 4;  // bits, which only weigh rounded tensors against exact ones
  return remaking_order(sites, kAbout, most_on_the_way(reference, allowed_by(reference, target)));
}

std::int64_t made_on_the_way(const Site& site, const Marked& marked) {
  return bytes_of(on_the_way(site, marked));
}

std::int64_t exact_bytes(const SiteTable& sites, const Marked& marked) {
  std::int64_t bytes = 0;
  for (const Site& site : sites.sites())
    if (marked.contains(&site) && site.remaking && site.remaking->exact)
      bytes += site.remaking->bytes;
  return bytes;
}

void read_laps(SiteTable& sites, std::int64_t step) {
  std::map<const Lap*, std::int64_t> products;
  for (Site& site : sites.sites()) {
    if (!site.remaking) continue;
    Remaking& remaking = *site.remaking;
    if (remaking.step != step) {
      site.remaking.reset();
      continue;
    }
    for (const auto& lap : remaking.laps) {
      remaking.ms += lap->ms().value_or(0);
      const auto number = static_cast<std::int64_t>(products.size()) + 1;
      const std::int64_t product = products.try_emplace(lap.get(), number).first->second;
      remaking.product = remaking.product == 0 ? product : std::min(remaking.product, product);
    }
    remaking.laps.clear();
  }
}

RemadePlan remade_by(const SiteTable& sites, std::int64_t held_bytes) {
  RemadePlan plan{.places = 0, .bytes = 0, .held_bytes = held_bytes, .ms = 0};
  std::map<std::int64_t, double> times;  // of a product
  for (const Site& site : sites.sites()) {
    if (!site.remade || !site.remaking) continue;
    ++plan.places;
    plan.bytes += site.remaking->bytes;
    double& ms = times[site.remaking->product];
    ms = std::max(ms, site.remaking->ms);
  }
  for (const auto& [product, ms] : times) plan.ms += ms;
  return plan;
}

}  // namespace backfold::torch_layer
