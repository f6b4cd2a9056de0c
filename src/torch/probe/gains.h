// SPDX-License-Identifier: Apache-2.0
//
// Signal gains: how much of the energy of a gradient at an edge arrives at the leaves.
//
// Where no tangent is known, an error is taken to fare as the gradient itself does: what a node
// makes of its input is recorded as energies, and from the leaves backwards
//
//   gain(node) = sum over its outputs of energy * gain(next node) / energy of its input.
//
// Where few bits are left, noise meets noise: what one node adds, the noise of the nodes after it
// multiplies. The gain of the gradient as it is there, by what it would be without their noise, is
// that factor.

#ifndef BACKFOLD_TORCH_PROBE_GAINS_H_
#define BACKFOLD_TORCH_PROBE_GAINS_H_

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <unordered_map>
#include <vector>

namespace backfold::torch_layer {

class Gains {
 public:
  // Energies are wanted; until then nothing is recorded.
  void want() { wanted_ = true; }
  bool wanted() const { return wanted_; }

  // A node has run. In the order in which nodes run. `clean` is what it would have sent on without
  // noise of its own.
  void record(const torch::autograd::Node& node, const std::vector<at::Tensor>& inputs,
              const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& clean);

  // Reads the energies. Once, after backward. `rest` is the gain of nodes that were not recorded.
  void settle(double rest);

  // Of an edge into `node`; 1 for a leaf.
  double of(const torch::autograd::Node* node) const;
  // By how much noise further on multiplies an error that enters `node`.
  double amplification(const torch::autograd::Node* node) const;
  // Energy that what a node sent on brings to the leaves.
  double sent_by(const torch::autograd::Node* node) const;

 private:
  struct Record {
    const torch::autograd::Node* node = nullptr;
    std::vector<const torch::autograd::Node*> next;
    // Of the inputs together, then of each output as it was, then of each without noise.
    std::vector<at::Tensor> norms;
  };
  struct Settled {
    double gain = 0, clean_gain = 0, sent = 0;
  };

  bool wanted_ = false;
  double rest_ = 0;
  std::vector<Record> records_;
  std::unordered_map<const torch::autograd::Node*, Settled> settled_;
  std::unordered_map<const torch::autograd::Node*, bool> leaves_;
};

// The tensor itself if it is fp32 or fp64, else a copy in fp32.
at::Tensor as_float(const at::Tensor& tensor);

// The norm of a tensor, on its device; 0 for tensors that have none.
at::Tensor norm_of(const at::Tensor& tensor);

// Energies as numbers, from norms on any devices, each a scalar or a vector: one synchronisation
// per device.
std::vector<double> read_energies(const std::vector<at::Tensor>& norms);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PROBE_GAINS_H_
