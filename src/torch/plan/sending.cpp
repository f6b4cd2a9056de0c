// SPDX-License-Identifier: Apache-2.0

#include "torch/plan/sending.h"

#include "torch/codec/policy.h"
#include "torch/offload/offloader.h"
#include "torch/plan/remaking.h"

namespace backfold::torch_layer {
namespace {

bool is_exact(const Site& site) {
  return site.ledger.lossy.elements == 0 || site.rule != Policy::kNone;
}

}  // namespace

Sendable::Sendable(const SiteTable& sites, const Marked& marked, std::int64_t step) {
  for (const Site& site : sites.sites()) {
    const Ledger& ledger = site.ledger;
    if (ledger.step != step || ledger.kind == Kind::kParameter || !is_exact(site)) continue;
    std::int64_t held = ledger.held_bytes;
    if (site.remaking && site.remaking->exact)
      held += ledger.remade_bytes - (marked.contains(&site) ? site.remaking->bytes : 0);
    add(site, held, ledger.saves);
  }
}

void Sendable::add(const Target& target, const std::vector<Bundle>& bundles, int width) {
  for (const Bundle& bundle : bundles) {
    const Footprint& reference = bundle.root->reference;
    add(*bundle.root, bytes_at(reference, width_from(target, bundle, width), bundle.grouping()),
        reference.packets);
  }
}

void Sendable::add(const Solution& solution) {
  for (std::size_t i = 0; i < solution.bundles.size(); ++i) {
    const Option& option = solution.options[i];
    const Site& root = *solution.bundles[i].root;
    std::int64_t bytes = option.bytes;
    for (const auto& [site, choice] : option.apart)  // in packets of their own, which stay
      bytes -= bytes_at(site->reference, choice.bits, choice.grouping);
    add(root, bytes, root.reference.packets);
  }
}

void Sendable::add(const Site& site, std::int64_t bytes, std::int64_t pieces) {
  if (site.stuck || pieces == 0 || bytes / pieces < Offloader::kLeastBytes) return;
  by_site_[&site] += bytes;
  bytes_ += bytes;
}

std::int64_t Sendable::let_leave(SiteTable& sites, std::int64_t bytes) const {
  std::int64_t leaving = 0;
  for (Site& site : sites.sites()) {
    const auto found = by_site_.find(&site);
    site.sent = found != by_site_.end() && leaving < bytes;
    if (site.sent) leaving += found->second;
  }
  return leaving;
}

}  // namespace backfold::torch_layer
