// SPDX-License-Identifier: Apache-2.0

#include "torch/plan/starts.h"

#include <cstdint>

namespace backfold::torch_layer {
namespace {

// Of the gradient's energy. Less than other tensors bring at 4 bits, for much of it may be bias,
// which no step averages out: of a small BERT's error of 0.030 at 4 bits 0.027 is
// (bench/run checkpoint).
constexpr double kPart = 0.02 * 0.02;

// Of the packet, which may be that of another site.
const Footprint& footprint(const Site& site) {
  return site.root ? site.root->reference : site.reference;
}

int safe_width(const Site& site, double most) {
  for (const int width : kCodeWidths)
    if (width >= site.sensitivity.errors.front().first &&
        width < 8 * footprint(site).element_bytes && error_at(site.sensitivity, width) <= most)
      return width;
  return kRawBits;
}

}  // namespace

void set_safe_widths(SiteTable& sites, const Target& target, std::optional<double> energy) {
  std::int64_t elements = 0;
  for (const Site& site : sites.sites())
    if (site.starts && !site.sensitivity.errors.empty()) elements += footprint(site).elements;
  for (Site& site : sites.sites()) {
    if (!site.starts) continue;
    site.safe = kRawBits;
    if (site.sensitivity.errors.empty()) continue;
    if (target.kind != Target::Kind::kBits) {
      site.safe = site.sensitivity.errors.front().first;
    } else if (energy && elements > 0) {
      const double share =
          static_cast<double>(footprint(site).elements) / static_cast<double>(elements);
      site.safe = safe_width(site, kPart * *energy * share);
    }
  }
}

}  // namespace backfold::torch_layer
