// SPDX-License-Identifier: Apache-2.0

#include "torch/plan/exact_agreement.h"

#include <algorithm>
#include <map>
#include <numeric>

namespace backfold::torch_layer {
namespace {

// What all of them say about one site.
struct Known {
  double ms = 0;  // of the product that makes it again
  bool stuck = false;
};

std::map<std::string, Known> known_of(const std::vector<Tables>& ranks) {
  std::map<std::string, Known> known;
  for (const Tables& rank : ranks)
    for (const SiteRecord& record : rank.sites) {
      Known& site = known[record.name];
      if (record.remaking) site.ms = std::max(site.ms, record.remaking->ms);
      site.stuck |= record.stuck;
    }
  return known;
}

// The sites of one process, with what all know about them and what is marked so far.
void take(const Tables& rank, const std::map<std::string, Known>& known,
          const ExactAgreement& agreed, SiteTable& sites) {
  sites.take(rank.sites);
  take_holdings(sites, rank.holdings, rank.steps);
  for (Site& site : sites.sites()) {
    const auto found = known.find(site.name);
    if (found != known.end()) {
      site.stuck = found->second.stuck;
      if (site.remaking) site.remaking->ms = found->second.ms;
    }
    site.remade = agreed.remade.contains(site.name);
    site.sent = agreed.sent.contains(site.name);
  }
}

void add_marks(const SiteTable& sites, ExactAgreement& agreed) {
  for (const Site& site : sites.sites()) {
    if (site.remade) agreed.remade.insert(site.name);
    if (site.sent) agreed.sent.insert(site.name);
  }
}

}  // namespace

ExactAgreement agree_exactly(const std::vector<Tables>& ranks, const Target& target) {
  const std::map<std::string, Known> known = known_of(ranks);
  ExactAgreement agreed;
  agreed.ms_per_sent_byte = slowest_link(ranks);
  for (const auto& [name, site] : known)
    if (site.stuck) agreed.stuck.insert(name);
  std::vector<std::size_t> order(ranks.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return is_larger(ranks[a].reference, ranks[b].reference);
  });
  const auto reference_of = [&](std::size_t rank) {
    StepReference reference = ranks[rank].reference;
    reference.ms_per_sent_byte = agreed.ms_per_sent_byte;
    return reference;
  };
  for (const std::size_t rank : order) {
    SiteTable sites;
    take(ranks[rank], known, agreed, sites);
    if (is_kept(sites, reference_of(rank), target, ranks[rank].steps)) continue;
    plan_exactly(sites, reference_of(rank), target, ranks[rank].steps);
    add_marks(sites, agreed);
  }
  SiteTable largest;
  take(ranks[order[0]], known, agreed, largest);
  agreed.plan = plan_in_force(largest, reference_of(order[0]), ranks[order[0]].steps);
  return agreed;
}

}  // namespace backfold::torch_layer
