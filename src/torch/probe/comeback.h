// SPDX-License-Identifier: Apache-2.0
//
// How a saved tensor would come back if it were folded, without folding it.

#ifndef BACKFOLD_TORCH_PROBE_COMEBACK_H_
#define BACKFOLD_TORCH_PROBE_COMEBACK_H_

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

#include "torch/capture/site.h"
#include "torch/store/derived.h"

namespace backfold::torch_layer {

struct ProbedCall;

// A tensor that a packet would hold: what a probe rounds.
struct Leaf {
  Site& site;
  at::Tensor tensor;
  std::shared_ptr<ProbedCall> call;
  std::shared_ptr<Hold> reference;  // that stands for it in derivations

  // A view of its storage, in a rounded copy of it; undefined where the copy does not hold it.
  at::Tensor view_of(const at::Tensor& folded, const View& view) const;
};

// How a saved tensor would come back: from a packet of its own, or made again from those of others.
struct Comeback {
  at::Tensor tensor;
  std::shared_ptr<Derived> derived;           // null for a packet of its own
  std::vector<std::shared_ptr<Leaf>> leaves;  // one, for a packet of its own

  // The tensor, with leaves replaced by what `fold` gives for them, where it gives any.
  using Fold = std::function<at::Tensor(const Leaf& leaf)>;
  at::Tensor with(const Fold& fold) const;
  // The roots of the leaves, each once.
  std::vector<const Site*> roots() const;
};

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PROBE_COMEBACK_H_
