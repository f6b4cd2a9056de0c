// SPDX-License-Identifier: Apache-2.0
//
// What folding adds at sites outside of the model's call: the loss, and whatever else the user's
// step computes there.
//
// No second forward runs through them. In the user's own backward, after such a node has run, it is
// run again with its tensor unfolded and folded; the user's gradient is not touched. The change is
// propagated through the following nodes to the model's outputs and kept there. Once the model's
// call was run again and the tangents of its outputs are known, the product is the error of the
// gradient (probe.h has the rest). A change that reaches a leaf on the way counts directly.

#ifndef BACKFOLD_TORCH_PROBE_OUTSIDE_H_
#define BACKFOLD_TORCH_PROBE_OUTSIDE_H_

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <map>
#include <memory>
#include <mutex>
#include <unordered_set>
#include <vector>

#include "torch/capture/calls.h"
#include "torch/capture/site.h"
#include "torch/probe/blocks.h"
#include "torch/probe/leaf_weights.h"
#include "torch/store/saved.h"

namespace backfold::torch_layer {

class Probe;

// A foldable tensor of a call outside of the model.
struct OutsideSaved {
  Site* site = nullptr;
  const void* source = nullptr;  // tells tensors of one call apart
  at::Tensor tensor;             // a copy, so that the tensor itself does not stay alive, unfolded
  std::shared_ptr<StandIn> stand_in;
  std::optional<std::int64_t> shares_along;  // as in Demand
};

// A tensor that the model returned.
struct ModelOutput {
  at::Tensor tensor;
  std::int64_t rows = 0;  // of its first dimension that are run again; 0 for all
};

class Outside {
 public:
  // The model's call will be recorded and run again. Otherwise nothing is measured here.
  void expect_model() { expected_ = true; }
  bool expects_model() const { return expected_; }
  // Whose weights finish() will be given. It learns of leaves that only the loss has.
  void tell_of_leaves(const std::shared_ptr<ArrivingGradients>& arriving) { arriving_ = arriving; }

  // The model's recorded call has returned. The order is that of finish()'s tangents.
  void model_returned(const std::vector<ModelOutput>& outputs);

  // A call outside of the model made this tensor.
  void add_node(const at::Tensor& result) {
    if (result.defined() && result.grad_fn()) nodes_.insert(result.grad_fn().get());
  }

  // After `node`, made by `op`, has run in the user's backward, given `inputs`.
  void measure(Probe& probe, torch::autograd::Node& node, const Operator& op,
               std::vector<OutsideSaved>& saved, const torch::autograd::variable_list& inputs);

  // `tangents` are those of the model's outputs, `epsilon` times too large.
  struct Energy {
    Site* site = nullptr;
    int bits = 0;
    at::Tensor norm;  // of the gradient's error
    double factor = 1;
  };
  std::vector<Energy> finish(const std::vector<at::Tensor>& tangents, double epsilon,
                             const LeafWeights& weights);

 private:
  // The changes that one run of a node with a folded tensor causes.
  struct Change {
    Site* site = nullptr;
    int bits = 0, draws = 1;
    Blocks blocks = Blocks::kSamples;
    std::map<std::size_t, at::Tensor> at_outputs;  // by ordinal, of the rows that are run again
    std::vector<std::pair<at::Tensor, at::Tensor>> at_leaves;  // and norms there
  };

  bool send_on(const torch::autograd::Node& node, const torch::autograd::variable_list& changes,
               Change& change) const;

  bool expected_ = false;
  std::weak_ptr<ArrivingGradients> arriving_;
  std::map<std::pair<const torch::autograd::Node*, std::uint32_t>, std::size_t> outputs_;
  std::vector<std::int64_t> rows_, kept_rows_;  // of each output
  std::unordered_set<const torch::autograd::Node*> nodes_;
  std::mutex mutex_;  // guards what follows: nodes run on autograd's threads
  std::vector<Change> changes_;
};

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PROBE_OUTSIDE_H_
