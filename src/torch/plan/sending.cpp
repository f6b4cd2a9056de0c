// SPDX-License-Identifier: Apache-2.0

#include "torch/plan/sending.h"

#include <algorithm>

#include "torch/codec/policy.h"
#include "torch/offload/offloader.h"

namespace backfold::torch_layer {
namespace {

// A packet that leaves has at most this many bits, unless a narrower one could not: the default
// settings train as plain does with as many on average, and each more takes time.
constexpr int kMostBits = 4;
// And this many at most, to be large enough.
constexpr int kWidest = 8;

// What leaves of so many bytes that a site keeps in so many pieces: all or nothing.
std::int64_t leaving(const Site& site, std::int64_t bytes, std::int64_t pieces) {
  return !site.stuck && pieces > 0 && bytes / pieces >= Offloader::kLeastBytes ? bytes : 0;
}

std::int64_t packets_leaving(const Site& site, int bits, const Grouping& grouping) {
  return leaving(site, bytes_at(site.reference, bits, grouping), site.reference.packets);
}

}  // namespace

std::vector<const Site*> sendable(const SiteTable& sites, std::int64_t step) {
  std::vector<const Site*> found;
  for (const Site& site : sites.sites()) {
    if (site.ledger.step != step) continue;
    const bool packs = site.ledger.lossy.elements > 0 && packets_leaving(site, kWidest, {}) > 0;
    if (packs || exact_leaving(site, {}, step) > 0) found.push_back(&site);
  }
  return found;
}

std::int64_t exact_leaving(const Site& site, const Marked& marked, std::int64_t step) {
  const Ledger& ledger = site.ledger;
  const bool exact = ledger.lossy.elements == 0 || site.rule != Policy::kNone;
  if (ledger.step != step || ledger.kind == Kind::kParameter || !exact) return 0;
  std::int64_t held = ledger.held_bytes;
  if (site.remaking && site.remaking->exact)
    held += ledger.remade_bytes - (marked.contains(&site) ? site.remaking->bytes : 0);
  return leaving(site, held, ledger.saves);
}

std::int64_t exact_leaving(const SiteTable& sites, const Remedies& remedies, std::int64_t step) {
  std::int64_t bytes = 0;
  for (const Site& site : sites.sites())
    if (remedies.sent.contains(&site)) bytes += exact_leaving(site, remedies.marked, step);
  return bytes;
}

std::optional<int> width_to_send(const Target& target, const Bundle& bundle, int least) {
  for (const int width : kCodeWidths) {
    if (width < least || width > kWidest) continue;
    const int bits = width_from(target, bundle, width);
    if (packets_leaving(*bundle.root, bits, bundle.grouping()) > 0) return bits;
  }
  return std::nullopt;
}

void have_leave(const Bundle& bundle, std::vector<Option>& options) {
  std::vector<Option> leave;
  for (Option option : options) {
    std::int64_t bytes = option.bytes;
    for (const auto& [site, choice] : option.apart)  // in packets of their own, which stay
      bytes -= bytes_at(site->reference, choice.bits, choice.grouping);
    option.leaves = leaving(*bundle.root, bytes, bundle.root->reference.packets);
    option.cost -= option.leaves;
    if (option.leaves > 0) leave.push_back(std::move(option));
  }
  if (leave.empty()) return;
  int narrowest = kRawBits;
  for (const Option& option : leave) narrowest = std::min(narrowest, option.choice.bits);
  std::erase_if(leave, [&](const Option& option) {
    return option.choice.bits > std::max(kMostBits, narrowest);
  });
  options = std::move(leave);
}

void send(SiteTable& sites, const Marked& sent) {
  for (Site& site : sites.sites()) site.sent = sent.contains(&site);
}

}  // namespace backfold::torch_layer
