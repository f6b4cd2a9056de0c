// SPDX-License-Identifier: Apache-2.0
//
// One save on its way through the store, and how its site's ledger is written. For the store's own
// sources.

#ifndef BACKFOLD_TORCH_STORE_SAVING_H_
#define BACKFOLD_TORCH_STORE_SAVING_H_

#include "torch/store/store.h"

namespace backfold::torch_layer {

struct Store::Saving {
  const at::Tensor& tensor;
  Site& site;
  const Demand& demand;
  const std::int64_t step;
  const std::int64_t bytes;  // that autograd would keep for this save
  bool first = false;        // save of its storage in this block
  int rule = Policy::kNone;  // of the policy
  Width width = {};
};

inline std::uint64_t scramble(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// The ledger of the step that a site saves in.
Ledger& ledger_of(Site& site, std::int64_t step);

// The kind of a site in a report is that of the save that holds most.
void describe(Ledger& ledger, Kind kind, int bits, const char* reason, std::int64_t held,
              const Grouping& grouping = {});

// Whether the plan has left what a site saved in this step unfolded.
inline bool is_unfolded_by_choice(const Site& site, std::int64_t step) {
  return site.ledger.step == step && site.ledger.lossy.elements > 0 && site.choice &&
         site.choice->bits == kRawBits;
}

// Counts a tensor whose width is a matter of choice.
void count_packet(Footprint& footprint, const at::Tensor& tensor, std::int64_t count);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_STORE_SAVING_H_
