// SPDX-License-Identifier: Apache-2.0

#include "torch/probe/leaf_weights.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "torch/capture/node_name.h"
#include "torch/probe/gains.h"
#include "torch/store/treatment.h"

namespace backfold::torch_layer {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

// Nodes that only rearrange or convert, and so preserve the energy of a gradient.
constexpr std::string_view kArranging =
    "TBackward0 TransposeBackward0 ViewBackward0 UnsafeViewBackward0 ReshapeAliasBackward0 "
    "PermuteBackward0 ToCopyBackward0 SqueezeBackward0 SqueezeBackward1 SqueezeBackward2 "
    "UnsqueezeBackward0 CloneBackward0 AliasBackward0 SliceBackward0 SelectBackward0 "
    "SplitBackward0 SplitWithSizesBackward0 NarrowBackward0 UnbindBackward0 ChunkBackward0";

// Of the energy of an element, over leaves that have any; 0 if none has.
double median_of(const std::vector<LeafEnergy>& leaves) {
  std::vector<double> energies;
  for (const LeafEnergy& leaf : leaves)
    if (std::isfinite(leaf.energy) && leaf.energy > 0)
      energies.push_back(leaf.energy / static_cast<double>(leaf.elements));
  if (energies.empty()) return 0;
  const auto middle = energies.begin() + static_cast<std::ptrdiff_t>(energies.size() / 2);
  std::nth_element(energies.begin(), middle, energies.end());
  return *middle;
}

bool has_gradient(const at::Tensor& leaf) {
  return leaf.defined() && leaf.requires_grad() && leaf.is_leaf() && !obstacle_in(leaf) &&
         at::isFloatingType(leaf.scalar_type()) && leaf.numel() > 0;
}

}  // namespace

double CommonScale::of(const LeafEnergy& leaf) const {
  if (scale == 0) return 1;
  const double middling = static_cast<double>(leaf.elements) * median;
  return scale / ((std::isfinite(leaf.energy) ? leaf.energy : middling) + middling);
}

CommonScale common_scale(const std::vector<LeafEnergy>& leaves) {
  CommonScale common{.median = median_of(leaves), .scale = 1};
  if (common.median == 0) return {};
  double energy = 0, weighted = 0;
  for (const LeafEnergy& leaf : leaves) {
    if (!std::isfinite(leaf.energy)) continue;
    energy += leaf.energy;
    weighted += common.of(leaf) * leaf.energy;
  }
  common.scale = energy / weighted;
  return common;
}

std::optional<at::Tensor> leaf_behind(const Node* node) {
  while (node) {
    if (const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(node))
      return leaf->variable;
    const std::string name = node->name();
    if (!is_one_of(name, kArranging) && name != "ExpandBackward0") return std::nullopt;
    node = node->num_outputs() > 0 ? node->next_edge(0).function.get() : nullptr;
  }
  return std::nullopt;
}

LeafWeights::LeafWeights(const std::vector<at::Tensor>& leaves,
                         const std::vector<double>& energies) {
  std::vector<LeafEnergy> all;
  for (std::size_t i = 0; i < leaves.size(); ++i) all.push_back({energies[i], leaves[i].numel()});
  common_ = common_scale(all);
  for (std::size_t i = 0; i < leaves.size(); ++i)
    weights_[leaves[i].const_data_ptr()] = common_.of(all[i]);
}

double LeafWeights::of(const at::Tensor& leaf) const {
  const auto found = weights_.find(leaf.const_data_ptr());
  if (found != weights_.end()) return found->second;
  return common_.of({.energy = std::nan(""), .elements = std::max<std::int64_t>(leaf.numel(), 1)});
}

std::vector<double> LeafWeights::of(const std::vector<LeafEnergy>& leaves) const {
  const CommonScale common = common_.scale == 0 ? common_scale(leaves) : common_;
  std::vector<double> weights;
  for (const LeafEnergy& leaf : leaves) weights.push_back(common.of(leaf));
  return weights;
}

// Not by register_hook(), which would drop hooks of other kinds.
class ArrivingGradients::Hook : public torch::autograd::FunctionPreHook {
 public:
  Hook(std::weak_ptr<ArrivingGradients> to, std::size_t leaf) : to_(std::move(to)), leaf_(leaf) {}
  variable_list operator()(const variable_list& gradients) override {
    if (const auto to = to_.lock()) to->add(leaf_, gradients[0]);
    return gradients;
  }
  // A compiled backward runs without this hook. The default implementation raises.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}

  bool is_of(const ArrivingGradients* one) const {
    const auto to = to_.lock();
    return !to || to.get() == one;
  }

 private:
  const std::weak_ptr<ArrivingGradients> to_;
  const std::size_t leaf_;
};

std::shared_ptr<ArrivingGradients> ArrivingGradients::at(const std::vector<at::Tensor>& leaves) {
  std::shared_ptr<ArrivingGradients> arriving(new ArrivingGradients);
  for (const at::Tensor& leaf : leaves) arriving->also_at(leaf);
  return arriving;
}

void ArrivingGradients::also_at(const at::Tensor& leaf) {
  if (!has_gradient(leaf)) return;
  const std::lock_guard lock(mutex_);
  const auto is_it = [&](const at::Tensor& known) { return known.is_same(leaf); };
  if (std::any_of(leaves_.begin(), leaves_.end(), is_it)) return;
  torch::autograd::impl::hooks(leaf).push_back(
      std::make_unique<Hook>(weak_from_this(), leaves_.size()));
  leaves_.push_back(leaf);
}

ArrivingGradients::~ArrivingGradients() {
  for (const at::Tensor& leaf : leaves_)
    std::erase_if(torch::autograd::impl::hooks(leaf), [&](const auto& hook) {
      const auto* ours = dynamic_cast<const Hook*>(hook.get());
      return ours && ours->is_of(this);
    });
}

void ArrivingGradients::add(std::size_t leaf, const at::Tensor& gradient) {
  if (!gradient.defined() || obstacle_in(gradient)) return;
  const at::AutoGradMode no_grad(false);
  try {
    const at::Tensor norm = norm_of(gradient.detach());
    const std::lock_guard lock(mutex_);
    norms_.push_back(norm);
    which_.push_back(leaf);
  } catch (const c10::Error&) {  // for want of memory, which must not end the user's backward
  }
}

bool ArrivingGradients::empty() const {
  const std::lock_guard lock(mutex_);
  return norms_.empty();
}

LeafWeights ArrivingGradients::weights() const {
  const std::lock_guard lock(mutex_);
  if (norms_.empty()) return {};
  const std::vector<double> arrived = read_energies(norms_);
  std::vector<double> energies(leaves_.size(), 0);
  for (std::size_t i = 0; i < arrived.size(); ++i) energies[which_[i]] += arrived[i];
  return {leaves_, energies};
}

}  // namespace backfold::torch_layer
