// SPDX-License-Identifier: Apache-2.0

#include "torch/store/width.h"

#include <algorithm>

namespace backfold::torch_layer {
namespace {

// Tensors of fewer bytes have this many bits until there is a plan: logits of attention can be
// large without a sign of it (X-CLIP: 197 at fresh weights, an error of 2 at 8 bits).
constexpr std::int64_t kSmall = 128 << 10;
int spared_bits(const Demand& demand) { return demand.reads == Reads::kFinely ? 16 : 8; }

}  // namespace

Width width_of(const Site& site, const Demand& demand, std::int64_t bytes,
               const WidthRules& rules) {
  // What a checkpoint starts again from has no width but that of a plan, which has measured it.
  if (demand.reads == Reads::kStart)
    return site.choice ? Width{site.choice, site.choice->bits} : Width{};
  if (!site.choice && !rules.bits) return {};
  Choice choice = site.choice ? *site.choice : Choice{*rules.bits, {}};
  if (rules.adaptive && !site.choice) {
    const bool spared = rules.spares_small && bytes < kSmall;
    choice.bits =
        std::max({choice.bits, site.floor, site.served_floor, spared ? spared_bits(demand) : 1});
  }
  // What was planned was measured, against the clean gradient: the table knows better.
  const int floor = rules.adaptive && site.choice ? 0 : demand.bits;
  choice.bits = std::max(choice.bits, floor);
  return {choice, rules.adaptive ? std::max(1, floor) : choice.bits};
}

int named_width(int bits, const Demand& demand) { return std::max(bits, demand.bits); }

int noise_width(const Site& site, const Site& root, bool zero_exact, int unplanned) {
  return root.choice ? root.choice->bits : std::max({unplanned, site.floor, zero_exact ? 2 : 1});
}

}  // namespace backfold::torch_layer
