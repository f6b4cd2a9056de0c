// SPDX-License-Identifier: Apache-2.0
//
// What a step has held at each site, as far as another process needs to know it to plan for it.

#ifndef BACKFOLD_TORCH_PLAN_HOLDINGS_H_
#define BACKFOLD_TORCH_PLAN_HOLDINGS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "torch/capture/site.h"

namespace backfold::torch_layer {

struct Holding {
  std::string site;
  std::int64_t saves = 0;
  std::int64_t held_bytes = 0;
  std::int64_t remade_bytes = 0;
  Kind kind = Kind::kPassed;
  bool packs = false;  // at a width that is a matter of choice
};

// Of the sites that this step has met.
std::vector<Holding> holdings_of(const SiteTable& sites, std::int64_t step);
// Makes a step of that number one that has held so much.
void take_holdings(SiteTable& sites, const std::vector<Holding>& holdings, std::int64_t step);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PLAN_HOLDINGS_H_
