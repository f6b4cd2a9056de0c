// SPDX-License-Identifier: Apache-2.0
//
// Signal gains: how much of the energy of a gradient at an edge arrives at the leaves.
//
// If no tangent is known, an error is assumed to be scaled like the gradient itself. The energies
// of each node's input and outputs are recorded, and give, from the leaves up,
//
//   gain(node) = sum over its outputs of energy * gain(next node) / energy of its input
//
// with the weights of leaves (leaf_weights.h) for theirs.
//
// At few bits, noise multiplies noise: the error that one node adds is amplified by the noise of
// the nodes after it. The amplification is the gradient's gain with that noise / its gain without.

#ifndef BACKFOLD_TORCH_PROBE_GAINS_H_
#define BACKFOLD_TORCH_PROBE_GAINS_H_

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <unordered_map>
#include <vector>

#include "torch/probe/leaf_weights.h"

namespace backfold::torch_layer {

class Gains {
 public:
  // Starts recording energies.
  void want() { wanted_ = true; }
  bool wanted() const { return wanted_; }

  // A node has run; to be called in the order in which nodes run. `clean` is what the node would
  // have passed on without noise of its own.
  void record(const torch::autograd::Node& node, const std::vector<at::Tensor>& inputs,
              const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& clean);

  // Reads the energies, once, after backward. `rest` is the gain of nodes that were not recorded.
  void settle(double rest, const LeafWeights& weights);

  // The gain of an edge into `node`; the weight of a leaf.
  double of(const torch::autograd::Node* node) const;
  // The factor by which later noise multiplies an error that enters `node`.
  double amplification(const torch::autograd::Node* node) const;
  // The energy that the outputs of a node bring to the leaves.
  double sent_by(const torch::autograd::Node* node) const;

 private:
  struct Record {
    const torch::autograd::Node* node = nullptr;
    std::vector<const torch::autograd::Node*> next;
    // Of all inputs together, then of each output, then of each output without noise.
    std::vector<at::Tensor> norms;
  };
  struct Settled {
    double gain = 0, clean_gain = 0, sent = 0;
  };

  bool wanted_ = false;
  double rest_ = 0;
  std::vector<Record> records_;
  std::unordered_map<const torch::autograd::Node*, Settled> settled_;
  std::unordered_map<const torch::autograd::Node*, at::Tensor> met_;  // leaves, until settled
  std::unordered_map<const torch::autograd::Node*, double> leaves_;   // their weights
};

// The tensor itself if it is fp32 or fp64, else a copy in fp32.
at::Tensor as_float(const at::Tensor& tensor);

// The norm of a tensor, on its device; 0 for sparse and complex ones.
at::Tensor norm_of(const at::Tensor& tensor);

// Energies as numbers, from norms on any devices, each a scalar or a vector: one synchronisation
// per device.
std::vector<double> read_energies(const std::vector<at::Tensor>& norms);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PROBE_GAINS_H_
