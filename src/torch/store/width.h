// SPDX-License-Identifier: Apache-2.0
//
// The width of one save, decided here alone.

#ifndef BACKFOLD_TORCH_STORE_WIDTH_H_
#define BACKFOLD_TORCH_STORE_WIDTH_H_

#include <cstdint>
#include <optional>

#include "torch/capture/site.h"
#include "torch/reads/demand.h"

namespace backfold::torch_layer {

// What is said about widths before a tensor is seen.
struct WidthRules {
  std::optional<int> bits;  // where no plan says otherwise; none: only what is exact
  bool adaptive = false;    // widths are the plan's: readers take what they find
  // Until there is a plan: small tensors take few bytes at any width, and are sensitive more often
  // than large ones (gates, heads, the last layers).
  bool spares_small = false;
};

struct Width {
  std::optional<Choice> choice;  // for a packet of its own; none: only what is exact
  int least = 0;  // that a packet of an earlier save must have to serve this one; 0: none does
};

// `bytes` is what autograd alone would keep for the save.
Width width_of(const Site& site, const Demand& demand, std::int64_t bytes, const WidthRules& rules);

// Of a width that the user names: what is read finely has a floor that it does not undercut.
int named_width(int bits, const Demand& demand);

// In a pass that folds nothing but carries the plan's noise. `unplanned` is the width of sites that
// have no plan; `root` is the site whose packet serves this one.
int noise_width(const Site& site, const Site& root, bool zero_exact, int unplanned);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_STORE_WIDTH_H_
