// SPDX-License-Identifier: Apache-2.0
//
// What a plan chooses among: bundles of sites that share a packet, the options for keeping each,
// and what an option costs.

#ifndef BACKFOLD_TORCH_PLAN_BUNDLES_H_
#define BACKFOLD_TORCH_PLAN_BUNDLES_H_

#include <c10/util/SmallVector.h>

#include <cstdint>
#include <set>
#include <vector>

#include "torch/capture/site.h"
#include "torch/plan/plan.h"

namespace backfold::torch_layer {

// Bits that a group's header adds to each of its elements.
inline constexpr double kHeaderBits = 0.25;

// Bits on average below which errors multiply each other.
inline constexpr int kNoisyBelow = 3;

// Sites that share a packet, and what is known of them together.
struct Bundle {
  struct Rider {
    Site* site = nullptr;
    const Sensitivity* sensitivity = nullptr;  // to the bundle's packet
  };
  Site* root = nullptr;
  std::vector<Rider> riders;
  int floor = 1;
  bool measured = false;
  bool raw = false;     // no width is safe: a checkpoint starts again from it
  bool starts = false;  // a checkpoint does, and `floor` is safe

  void add(const Site& site, const Sensitivity& sensitivity);
  // The same without that rider.
  Bundle without(const Site& site) const;
  double error(int bits) const;
  // The table that says which grouping and codecs suit the packet.
  const Sensitivity& ranked() const;
  Grouping grouping() const { return ranked().grouping; }
  // Codecs of the menu. None if any site reads the packet finely or for its signs.
  const c10::SmallVector<Sensitivity::Offer, 1>& offers() const;
};

// First savers of memory that products make again.
using Marked = std::set<const Site*>;
// Those that the plan in force has marked.
Marked marked_now(const SiteTable& sites);

// What brings bytes down besides widths.
struct Remedies {
  Marked marked = {};  // what products make again
  Marked sent = {};    // places from which what is kept leaves its device, for a budget
};
// Those of the plan in force.
Remedies remedies_now(const SiteTable& sites, const Target& target);

// The bundles that recent steps saved, sorted by the name of their root, if products made again
// what is marked. Sites that were not served so yet ride on what they would be made from, with the
// error that rounding them alone would have.
std::vector<Bundle> bundles_of(SiteTable& sites, std::int64_t step, const Marked& marked);

// One way to keep a bundle.
struct Option {
  Choice choice;
  std::int64_t bytes = 0, cost = 0;  // cost is in the unit of the target
  double error = 0;
  // Derived sites that get packets of their own.
  std::vector<std::pair<Site*, Choice>> apart = {};
  std::int64_t leaves = 0;  // of the bytes; they cost nothing
};

std::int64_t bytes_at(const Footprint& reference, int bits, const Grouping& grouping);

// The narrowest width from `least` up that the bundle allows, or its widest if all are narrower.
int width_from(const Target& target, const Bundle& bundle, int least);

// Every option for a bundle: its widths, codecs of the menu, and cuts, in which derived sites have
// packets of their own, of more bits. (A packet of the same size is not worth it: the root would
// serve both at those bits. One of a smaller tensor may be.) A bundle that was not measured has a
// single width, `uniform`.
std::vector<Option> options_for(const Target& target, const Bundle& bundle, int uniform);

// The bundle kept unfolded. That costs nothing against a target of bits or ratio, which then holds
// for the other bundles only.
Option kept_option(const Target& target, const Bundle& bundle);

// What all bundles together may cost, in the unit of the target.
std::int64_t allowance(const Target& target, const StepReference& reference,
                       const std::vector<Bundle>& bundles);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PLAN_BUNDLES_H_
