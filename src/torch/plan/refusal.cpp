// SPDX-License-Identifier: Apache-2.0

#include "torch/plan/refusal.h"

#include <c10/util/Exception.h>

#include <utility>

#include "torch/plan/moments.h"
#include "torch/plan/wording.h"

namespace backfold::torch_layer {
namespace {

// Names the sites with the largest tensors that no width can shrink.
std::string largest_fixed(const SiteTable& sites, std::int64_t step) {
  std::vector<SiteBytes> fixed;
  for (const Site& site : sites.sites())
    if (site.ledger.step == step && site.ledger.lossy.elements == 0 && site.ledger.held_bytes > 0 &&
        site.ledger.kind != Kind::kParameter)
      fixed.emplace_back(&site, site.ledger.held_bytes);
  return largest_of(std::move(fixed));
}

}  // namespace

std::string largest_at(int moment, const std::vector<Bundle>& bundles,
                       const std::vector<std::int64_t>& bytes) {
  std::vector<SiteBytes> there;
  for (std::size_t i = 0; i < bundles.size(); ++i)
    if (bundles[i].root->stay.from <= moment && moment < bundles[i].root->stay.until)
      there.emplace_back(bundles[i].root, bytes[i]);
  return largest_of(std::move(there));
}

void refuse(const SiteTable& sites, const StepReference& reference, const Target& target,
            const Least& least, std::int64_t step) {
  const std::int64_t held = reference.fixed_bytes + least.bytes;
  if (has_moments(reference, target)) {
    const std::int64_t peak = static_cast<std::int64_t>(target.value) + least.excess.bytes;
    const std::int64_t rest = reference.moments[static_cast<std::size_t>(least.excess.moment)];
    TORCH_CHECK_VALUE(false, "peak=", static_cast<std::int64_t>(target.value),
                      " bytes cannot be kept: the lowest possible is ", peak, " bytes (",
                      mebibytes(peak), "), ", mebibytes(rest), " of it besides packets",
                      least.largest.empty() ? "" : ", and of what is kept most by ", least.largest);
  }
  const std::string fixed = largest_fixed(sites, step);
  const std::string holds = mebibytes(reference.fixed_bytes) +
                            " of it in tensors that are not compressed" +
                            (fixed.empty() ? "" : ", the largest " + fixed);
  if (target.kind == Target::Kind::kRatio)
    TORCH_CHECK_VALUE(false, "ratio=", target.value, " cannot be reached: the highest possible is ",
                      static_cast<double>(reference.unique_bytes) / static_cast<double>(held),
                      ", because ", mebibytes(held), " are held even at the fewest bits, ", holds);
  TORCH_CHECK_VALUE(false, name_of(target.kind), "=", static_cast<std::int64_t>(target.value),
                    " bytes cannot be met: the lowest possible is ", held, " bytes (",
                    mebibytes(held), "), ", holds,
                    target.kind == Target::Kind::kBudget && reference.ms_per_sent_byte
                        ? ", even if all is offloaded that can be"
                        : "");
}

}  // namespace backfold::torch_layer
