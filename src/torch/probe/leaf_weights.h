// SPDX-License-Identifier: Apache-2.0
//
// How much an error counts in the gradient of each leaf.
//
// Training does not feel the sum of all squared errors, which the few leaves with the largest
// gradients dominate: Adam divides each gradient by its own size, and a weight in front of a norm
// has no scale. So an error is taken in relation to its leaf's gradient. The weight of a leaf is
//
//   scale / (energy of its gradient + elements * m)
//
// with m the median over leaves of energy / elements. It keeps a leaf with hardly any gradient,
// such as a bias in front of a norm, from counting more than others. The scale leaves the energy of
// the whole gradient what it is, so that weighted errors can be compared with it.

#ifndef BACKFOLD_TORCH_PROBE_LEAF_WEIGHTS_H_
#define BACKFOLD_TORCH_PROBE_LEAF_WEIGHTS_H_

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

namespace backfold::torch_layer {

struct LeafEnergy {
  double energy = 0;  // of its gradient
  std::int64_t elements = 0;
};

// What the weights of some leaves have in common.
struct CommonScale {
  double median = 0, scale = 0;  // both 0 where nothing is known: every leaf counts 1

  // One whose energy is not finite counts as a leaf with the median.
  double of(const LeafEnergy& leaf) const;
};

CommonScale common_scale(const std::vector<LeafEnergy>& leaves);

// The leaf that an edge into `node` ends in, through views and casts; none if it ends elsewhere.
std::optional<at::Tensor> leaf_behind(const torch::autograd::Node* node);

class LeafWeights {
 public:
  LeafWeights() = default;  // every leaf counts 1
  LeafWeights(const std::vector<at::Tensor>& leaves, const std::vector<double>& energies);

  // Leaves are told apart by their memory: a probe may run with others in place of the user's. Any
  // that was not given counts as one with the median.
  double of(const at::Tensor& leaf) const;
  // The weights of others beside them. If nothing is known, they are all there is.
  std::vector<double> of(const std::vector<LeafEnergy>& leaves) const;

 private:
  CommonScale common_;
  std::unordered_map<const void*, double> weights_;
};

// The energies of gradients as they arrive at leaves, while it exists, in any number of backwards.
class ArrivingGradients : public std::enable_shared_from_this<ArrivingGradients> {
 public:
  // Leaves that are not dense floating-point tensors with a gradient are left out.
  static std::shared_ptr<ArrivingGradients> at(const std::vector<at::Tensor>& leaves);
  // One more, which may be met in the midst of a backward that has not come to it yet.
  void also_at(const at::Tensor& leaf);
  ~ArrivingGradients();
  ArrivingGradients(const ArrivingGradients&) = delete;
  ArrivingGradients& operator=(const ArrivingGradients&) = delete;

  bool empty() const;
  // From what has arrived. Waits for the devices.
  LeafWeights weights() const;

 private:
  class Hook;

  ArrivingGradients() = default;
  void add(std::size_t leaf, const at::Tensor& gradient);

  mutable std::mutex mutex_;  // guards what follows: gradients arrive on autograd's threads
  std::vector<at::Tensor> leaves_;
  std::vector<std::size_t> which_;
  std::vector<at::Tensor> norms_;  // of the gradients of leaves_[which_[i]]
};

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PROBE_LEAF_WEIGHTS_H_
