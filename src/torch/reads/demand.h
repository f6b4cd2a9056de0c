// SPDX-License-Identifier: Apache-2.0
//
// What the backward of the running call needs of a tensor that the call saves.

#ifndef BACKFOLD_TORCH_READS_DEMAND_H_
#define BACKFOLD_TORCH_READS_DEMAND_H_

#include <ATen/core/Tensor.h>

#include <optional>

#include "torch/capture/calls.h"
#include "torch/reads/exact_ops.h"
#include "torch/reads/norms.h"

namespace backfold::torch_layer {

struct Demand {
  int slot = 0;  // position of the argument; results are numbered after all arguments
  Reads reads = Reads::kValues;
  int bits = 0;                // the fewest allowed, if values are read
  const Rule* rule = nullptr;  // the row of the table it comes from, if any
  const char* reason = "";
  bool openable = false;      // kept exact unless the user names the function in codec=
  PredicateFormat predicate;  // without type and count
  Bound bound;
  std::optional<NormCall> norm;  // if the tensor is the input of one
  // The dimension along which shares add up to 1, if the tensor is their logarithms (shares.h).
  std::optional<std::int64_t> shares_along;
};

// Finds the tensor among the call's arguments and applies the table. If a tensor is passed as
// several arguments, the strictest demand holds.
Demand demand_of(RunningCall& call, const at::Tensor& tensor);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_READS_DEMAND_H_
