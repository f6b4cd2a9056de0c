// SPDX-License-Identifier: Apache-2.0
//
// What the backward of the running call will want of a tensor that it saves.

#ifndef BACKFOLD_TORCH_READS_DEMAND_H_
#define BACKFOLD_TORCH_READS_DEMAND_H_

#include <ATen/core/Tensor.h>

#include <optional>

#include "torch/capture/calls.h"
#include "torch/reads/exact_ops.h"
#include "torch/reads/norms.h"

namespace backfold::torch_layer {

struct Demand {
  int slot = 0;  // position of the argument, or past them the ordinal of a result
  Reads reads = Reads::kValues;
  int bits = 0;                // the fewest, where values are read
  const Rule* rule = nullptr;  // where it comes from, if from the table
  const char* reason = "";
  bool openable = false;      // exact unless the user names the function in codec=
  PredicateFormat predicate;  // type and count still to be filled in
  Bound bound;
  std::optional<NormCall> norm;  // where the tensor is the input of one
};

// Finds the tensor among the call's arguments and applies the table. A tensor that is several
// arguments at once is wanted as the strictest of them wants it.
Demand demand_of(RunningCall& call, const at::Tensor& tensor);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_READS_DEMAND_H_
