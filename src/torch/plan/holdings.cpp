// SPDX-License-Identifier: Apache-2.0

#include "torch/plan/holdings.h"

#include <string_view>
#include <unordered_map>

namespace backfold::torch_layer {

std::vector<Holding> holdings_of(const SiteTable& sites, std::int64_t step) {
  std::vector<Holding> holdings;
  for (const Site& site : sites.sites()) {
    const Ledger& ledger = site.ledger;
    if (ledger.step != step) continue;
    holdings.push_back({.site = site.name,
                        .saves = ledger.saves,
                        .held_bytes = ledger.held_bytes,
                        .remade_bytes = ledger.remade_bytes,
                        .kind = ledger.kind,
                        .packs = ledger.lossy.elements > 0});
  }
  return holdings;
}

void take_holdings(SiteTable& sites, const std::vector<Holding>& holdings, std::int64_t step) {
  std::unordered_map<std::string_view, const Holding*> by_name;
  for (const Holding& holding : holdings) by_name.emplace(holding.site, &holding);
  for (Site& site : sites.sites()) {
    const auto found = by_name.find(site.name);
    if (found == by_name.end()) continue;
    const Holding& holding = *found->second;
    Ledger& ledger = site.ledger;
    ledger.step = step;
    ledger.saves = holding.saves;
    ledger.held_bytes = holding.held_bytes;
    ledger.remade_bytes = holding.remade_bytes;
    ledger.kind = holding.kind;
    ledger.lossy.elements = holding.packs;
  }
}

}  // namespace backfold::torch_layer
