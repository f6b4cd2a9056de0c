// SPDX-License-Identifier: Apache-2.0
//
// What a plan has leave its device, so that a budget is kept.
//
// Bytes are alike here: how many leave is decided first (remedies.h), then from which places. What
// is saved first is read last, and has most time to come back, so places leave in the order of
// forward.

#ifndef BACKFOLD_TORCH_PLAN_SENDING_H_
#define BACKFOLD_TORCH_PLAN_SENDING_H_

#include <cstdint>
#include <unordered_map>

#include "torch/capture/site.h"
#include "torch/plan/bundles.h"
#include "torch/plan/solve.h"

namespace backfold::torch_layer {

// What could leave, by place: what it keeps in pieces that are worth sending, unless some of it was
// stuck before.
class Sendable {
 public:
  // What is held unrounded, if products make again what is marked.
  Sendable(const SiteTable& sites, const Marked& marked, std::int64_t step);

  // And packets: at one width, or as they were chosen.
  void add(const Target& target, const std::vector<Bundle>& bundles, int width);
  void add(const Solution& solution);

  std::int64_t bytes() const { return bytes_; }
  // Marks sites, until so many bytes leave or nothing more can, and no others. Returns the bytes.
  std::int64_t let_leave(SiteTable& sites, std::int64_t bytes) const;

 private:
  void add(const Site& site, std::int64_t bytes, std::int64_t pieces);

  std::unordered_map<const Site*, std::int64_t> by_site_;
  std::int64_t bytes_ = 0;
};

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PLAN_SENDING_H_
