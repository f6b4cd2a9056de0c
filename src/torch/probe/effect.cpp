// SPDX-License-Identifier: Apache-2.0

#include "torch/probe/effect.h"

#include <ATen/ExpandUtils.h>
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

#include "torch/capture/node_name.h"
#include "torch/probe/blocks.h"
#include "torch/probe/closed_form.h"
#include "torch/probe/leaf_weights.h"
#include "torch/store/geometry.h"

namespace backfold::torch_layer {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

// Library calls that draw random numbers, keep state, or consume their saved tensors.
constexpr std::string_view kOnce =
    "CudnnRnnBackward0 MiopenRnnBackward0 MkldnnRnnLayerBackward0 CopySlices";
constexpr std::string_view kOnceOperators =
    "aten::_cudnn_rnn aten::miopen_rnn aten::mkldnn_rnn_layer";

// Tensors of up to this many elements are kept, to take many norms at once later.
constexpr std::int64_t kSmall = 1 << 16;

// How folding changes the gradient along one edge.
at::Tensor change(const at::Tensor& folded, const at::Tensor& clean) {
  at::Tensor reduced = folded;
  if (!folded.is_same_size(clean)) reduced = at::sum_to(folded, clean.sizes());
  return as_float(reduced) - as_float(clean);
}

// The error as it arrives at the leaf that an edge leads to.
at::Tensor at_leaf(const Node* node, at::Tensor error) {
  for (; node && !dynamic_cast<const torch::autograd::AccumulateGrad*>(node);
       node = node->next_edge(0).function.get()) {
    if (node->name() == "ExpandBackward0")
      error = (*const_cast<Node*>(node))(variable_list{error})[0];
  }
  return error;
}

// Measures the error that one run of a node with folded tensors brings to the leaves.
void measure_run(Probe& probe, const Node& node, const ProbedCall& call, Site& site,
                 const Site* root, int bits, const variable_list& clean,
                 const variable_list& folded) {
  std::vector<at::Tensor> sums;  // by block, over edges with equal blocks
  std::vector<const Node*> into;
  const auto add = [&](const at::Tensor& error, double factor, const Node* via, const Node* into) {
    const bool small = error.numel() <= kSmall && error.layout() == at::kStrided;
    probe.add({&site,
               {bits},
               Sensitivity::Estimate::kRerun,
               small ? error : norm_of(error),
               !small,
               factor,
               via,
               into,
               root});
  };
  for (std::size_t i = 0; i < clean.size() && i < folded.size(); ++i) {
    const auto& edge = node.next_edge(i);
    if (!clean[i].defined() || !folded[i].defined() || !edge.function) continue;
    const at::Tensor error = change(folded[i], clean[i]);
    if (const auto leaf = leaf_behind(edge.function.get())) {
      add(at_leaf(edge.function.get(), error), std::sqrt(probe.weights().of(*leaf)), nullptr,
          nullptr);
      continue;
    }
    const auto input = std::find_if(call.inputs.begin(), call.inputs.end(), [&](const auto& one) {
      return one.function == edge.function.get() && one.number == edge.input_nr;
    });
    if (input == call.inputs.end() || !input->tangent.defined() ||
        !input->tangent.is_same_size(error)) {
      add(error, 1, edge.function.get(), nullptr);
      continue;
    }
    at::Tensor sum =
        block_sums(error, input->tangent, blocks_of(call.op->name, call.op->slots[input->slot]));
    const auto like = std::find_if(sums.begin(), sums.end(),
                                   [&](const at::Tensor& one) { return one.is_same_size(sum); });
    if (like == sums.end()) {
      sums.push_back(std::move(sum));
      into.push_back(edge.function.get());
    } else {
      *like = *like + sum;
    }
  }
  for (std::size_t i = 0; i < sums.size(); ++i) add(sums[i], 1 / probe.epsilon(), nullptr, into[i]);
}

// A call's saved tensors by the packets that they come back from. Those of one packet are folded
// together.
std::vector<std::pair<const Site*, std::vector<std::shared_ptr<Probed>>>> by_root(
    const ProbedCall& call) {
  std::vector<std::pair<const Site*, std::vector<std::shared_ptr<Probed>>>> bundles;
  for (const auto& weak : call.saved) {
    const auto one = weak.lock();
    if (!one) continue;
    for (const Site* root : one->roots()) {
      const auto same = std::find_if(bundles.begin(), bundles.end(),
                                     [&](const auto& bundle) { return bundle.first == root; });
      if (same == bundles.end()) {
        bundles.push_back({root, {one}});
      } else {
        same->second.push_back(one);
      }
    }
  }
  return bundles;
}

// Brackets a second run of a node: its saved tensors come back folded, or unfolded, meanwhile.
class Again {
 public:
  explicit Again(const ProbedCall& call) {
    for (const auto& weak : call.saved)
      if (const auto one = weak.lock()) saved_.push_back(one);
    for (const auto& one : saved_) one->begin_again();
  }
  ~Again() {
    for (const auto& one : saved_) one->end_again();
  }
  Again(const Again&) = delete;
  Again& operator=(const Again&) = delete;

 private:
  std::vector<std::shared_ptr<Probed>> saved_;
};

void measure(Probe& probe, Node& node, const ProbedCall& call, const variable_list& clean,
             const variable_list& inputs) {
  for (const auto& [root, bundle] : by_root(call)) {
    Site& site = bundle[0]->site();
    const auto widths = probe.widths(site, *root);
    if (call.closed_form) {
      if (!inputs[0].defined()) continue;
      const at::Tensor energies =
          closed_form(*call.op, call.arguments, inputs[0], bundle[0]->error_energies(root));
      const auto weight = weight_of_closed_form(*call.op, call.arguments);
      probe.add({.site = &site,
                 .bits = widths,
                 .estimate = Sensitivity::Estimate::kClosedForm,
                 .values = energies.sqrt(),
                 .factor = std::sqrt(probe.weights().of(weight)),
                 .root = root});
      continue;
    }
    for (const int bits : widths) {
      const Again again(call);
      std::map<const Leaf*, at::Tensor> folded;
      for (const auto& probed : bundle) {
        probed->fold(probed->comeback().with([&, root = root](const Leaf& leaf) {
          if (&root_of(leaf.site) != root) return at::Tensor();
          const auto [at, first] = folded.try_emplace(&leaf);
          if (first) at->second = probe.folded(leaf, bits, probe.next_key());
          return at->second;
        }));
      }
      folded.clear();
      measure_run(probe, node, call, site, root, bits, clean, node(variable_list(inputs)));
    }
  }
}

// What a node passes on if none of its saved tensors are folded.
variable_list without_noise(Node& node, const ProbedCall& call, const variable_list& outputs,
                            const variable_list& inputs) {
  const Again again(call);
  variable_list clean = node(variable_list(inputs));
  clean.resize(outputs.size());
  for (std::size_t i = 0; i < clean.size(); ++i)
    if (clean[i].defined() && outputs[i].defined() && !clean[i].is_same_size(outputs[i]))
      clean[i] = at::sum_to(clean[i], outputs[i].sizes());
  return clean;
}

}  // namespace

bool can_run_again(const Node& node) { return is_builtin(node) && !is_one_of(node.name(), kOnce); }

bool can_run_again(const Operator& op) {
  return !op.opaque && !op.compiled && !is_one_of(op.name, kOnceOperators);
}

variable_list EffectHook::operator()(const variable_list& outputs, const variable_list& inputs) {
  const auto probe = probe_.lock();
  if (!probe) return outputs;
  const at::AutoGradMode no_grad(false);
  try {
    observe(*probe, outputs, inputs);
  } catch (const c10::Error& error) {
    TORCH_WARN("backfold: could not measure the effect of folding the tensors saved by ",
               call_ ? call_->op->name : node_.name(), ": ", error.what_without_backtrace());
  }
  return outputs;
}

void EffectHook::observe(Probe& probe, const variable_list& outputs, const variable_list& inputs) {
  const bool measures = call_ && probe.pass() == Probe::Pass::kClean && can_run_again(node_);
  if (!measures) probe.record_gains(node_, inputs, outputs, outputs);
  const bool outside = call_ && !call_->outside.empty();
  if (!measures && !outside) return;
  const auto forget = c10::make_scope_exit([this] {
    call_->inputs.clear();
    call_->arguments.clear();
    call_->outside.clear();
  });
  if (outside) {
    probe.outside().measure(probe, node_, *call_->op, call_->outside, inputs);
    return;
  }
  const bool noisy = probe.is_noisy() && !call_->closed_form;
  const variable_list clean =
      noisy ? without_noise(node_, *call_, outputs, inputs) : variable_list();
  probe.record_gains(node_, inputs, outputs, noisy ? clean : outputs);
  measure(probe, node_, *call_, noisy ? clean : outputs, inputs);
}

}  // namespace backfold::torch_layer
