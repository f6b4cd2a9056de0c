// SPDX-License-Identifier: Apache-2.0
//
// Tangents of the inputs of calls: how each input moves when the leaves move by epsilon * v, from
// the difference of two forward passes.

#ifndef BACKFOLD_TORCH_PROBE_TANGENTS_H_
#define BACKFOLD_TORCH_PROBE_TANGENTS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "torch/capture/calls.h"
#include "torch/capture/site.h"
#include "torch/probe/probed.h"

namespace backfold::torch_layer {

class Tangents {
 public:
  // A new pass: calls are counted from the start again.
  void begin() { seen_.clear(); }

  // In the pass with moved leaves: keeps the inputs of a call.
  void note(const RunningCall& call, const Site& site);

  // In the pass at the leaves' own values: the inputs of a call, with their tangents if the first
  // pass noted the same call. Tangents are epsilon times too large.
  std::vector<ProbedInput> take(const RunningCall& call, const Site& site);

 private:
  struct Moved {
    const Operator* op = nullptr;
    std::vector<std::pair<at::Tensor, std::uint32_t>> inputs;  // with their versions
  };

  std::map<std::pair<const Site*, int>, Moved> moved_;  // by site and occurrence
  std::map<const Site*, int> seen_;
};

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PROBE_TANGENTS_H_
