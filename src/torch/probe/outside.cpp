// SPDX-License-Identifier: Apache-2.0

#include "torch/probe/outside.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "torch/capture/node_name.h"
#include "torch/codec/shares.h"
#include "torch/probe/effect.h"
#include "torch/probe/probe.h"
#include "torch/store/geometry.h"

namespace backfold::torch_layer {
namespace {

using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::variable_list;

// The most nodes to follow from a site to the model's outputs. A loss has few; longer paths, such
// as a head of the network that runs outside of the model, are given up.
constexpr int kMostNodes = 64;
// Blocks that a mean is taken over. If a gradient has fewer, rounding is drawn several times.
constexpr std::int64_t kEnoughBlocks = 32;
constexpr std::int64_t kMostDraws = 8;

// Nodes that keep rows of the last dimension intact.
constexpr std::string_view kKeepRows =
    "ViewBackward0 UnsafeViewBackward0 ReshapeAliasBackward0 AliasBackward0 ToCopyBackward0";

// A gradient as the engine would pass it to the node of an edge; undefined if it would refuse.
at::Tensor made_for(const Edge& edge, at::Tensor gradient) {
  const auto& metadata = edge.function->input_metadata(edge.input_nr);
  if (!metadata.is_same_shape(gradient)) {
    if (!metadata.is_expandable_to_shape(gradient)) return {};
    gradient = metadata.reduce_grad(gradient);
  }
  return gradient.to(metadata.dtype());
}

std::int64_t blocks_in(const at::Tensor& error, Blocks blocks) {
  if (error.dim() < 2) return std::max<std::int64_t>(error.dim() == 1 ? error.size(0) : 1, 1);
  return std::max<std::int64_t>(blocks == Blocks::kRows
                                    ? error.numel() / std::max<std::int64_t>(error.size(-1), 1)
                                    : error.size(0),
                                1);
}

// Makes the stand-ins of a call's saved tensors return their tensors during its lifetime.
class Standing {
 public:
  explicit Standing(const std::vector<OutsideSaved>& saved) : saved_(saved) {
    for (const OutsideSaved& one : saved_) one.stand_in->tensor = one.tensor;
  }
  ~Standing() {
    for (const OutsideSaved& one : saved_) one.stand_in->tensor.reset();
  }
  Standing(const Standing&) = delete;
  Standing& operator=(const Standing&) = delete;

 private:
  const std::vector<OutsideSaved>& saved_;
};

}  // namespace

void Outside::model_returned(const std::vector<ModelOutput>& outputs) {
  outputs_.clear();
  rows_.clear();
  kept_rows_.clear();
  for (const ModelOutput& output : outputs) {
    const at::Tensor& tensor = output.tensor;
    if (tensor.grad_fn())
      outputs_.emplace(std::pair(tensor.grad_fn().get(), tensor.output_nr()), rows_.size());
    rows_.push_back(tensor.dim() > 0 ? tensor.size(0) : 1);
    kept_rows_.push_back(output.rows);
  }
}

bool Outside::send_on(const Node& node, const variable_list& changes, Change& change) const {
  // The node furthest from the leaves runs first: all that arrives at it has arrived by then.
  std::map<std::pair<std::uint64_t, Node*>, variable_list> waiting;
  bool rows_stay = true;
  const auto arrive = [&](const Edge& edge, const at::Tensor& given) {
    if (!edge.function || !given.defined()) return true;
    const at::Tensor error = made_for(edge, given);
    if (!error.defined()) return false;
    const auto output = outputs_.find({edge.function.get(), edge.input_nr});
    if (output != outputs_.end()) {
      const std::size_t ordinal = output->second;
      const std::int64_t kept = kept_rows_[ordinal];
      at::Tensor part = kept > 0 ? error.narrow(0, 0, kept) : error;
      // In half the precision, as tangents are.
      part = part.to(part.scalar_type() == at::kDouble ? at::kFloat : at::kBFloat16);
      at::Tensor& there = change.at_outputs[ordinal];
      there = there.defined() ? there + part : part;
      return true;
    }
    const bool leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(edge.function.get());
    if (!leaf && (!nodes_.contains(edge.function.get()) || !can_run_again(*edge.function)))
      return false;
    variable_list& inputs = waiting[{edge.function->topological_nr(), edge.function.get()}];
    inputs.resize(edge.function->num_inputs());
    at::Tensor& there = inputs[edge.input_nr];
    there = there.defined() ? there + error : error;
    return true;
  };
  const auto send = [&](const Node& from, const variable_list& sent) {
    for (std::size_t i = 0; i < sent.size() && i < from.num_outputs(); ++i)
      if (!arrive(from.next_edge(i), sent[i])) return false;
    return true;
  };
  if (!send(node, changes)) return false;
  for (int run = 0; !waiting.empty(); ++run) {
    if (run == kMostNodes) return false;
    auto furthest = waiting.extract(std::prev(waiting.end()));
    Node& next = *furthest.key().second;
    if (const auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(&next)) {
      if (const auto arriving = arriving_.lock()) arriving->also_at(leaf->variable);
      change.at_leaves.emplace_back(leaf->variable, norm_of(furthest.mapped()[0]));
      continue;
    }
    rows_stay &= is_one_of(next.name(), kKeepRows);
    if (!send(next, next(std::move(furthest.mapped())))) return false;
  }
  for (const auto& [ordinal, error] : change.at_outputs)
    for (const at::Tensor& sent : changes)
      rows_stay &=
          !sent.defined() || (error.dim() > 0 && sent.dim() > 0 && error.size(-1) == sent.size(-1));
  if (!rows_stay) change.blocks = Blocks::kSamples;
  return true;
}

void Outside::measure(Probe& probe, Node& node, const Operator& op,
                      std::vector<OutsideSaved>& saved, const variable_list& inputs) {
  if (outputs_.empty() || !can_run_again(node)) return;
  const RunningAgain again;
  const Standing standing(saved);
  const variable_list clean = node(variable_list(inputs));
  for (auto first = saved.begin(); first != saved.end(); ++first) {
    const auto same = [&](const OutsideSaved& one) {
      return same_elements(one.tensor, first->tensor);
    };
    if (std::find_if(saved.begin(), first, same) != first) continue;  // folded with an earlier one
    for (const int bits : probe.widths(*first->site, root_of(*first->site))) {
      std::vector<Change> changes;
      std::int64_t draws = 1;
      for (std::int64_t draw = 0; draw < draws; ++draw) {
        const at::Tensor folded = round_trip(
            first->tensor, probe.format_of(*first->site, first->tensor, bits), probe.next_key());
        if (first->shares_along) restore_sums(folded, *first->shares_along);
        for (const OutsideSaved& one : saved)
          if (same(one)) one.stand_in->tensor = folded;
        variable_list sent = node(variable_list(inputs));
        for (std::size_t i = 0; i < sent.size() && i < clean.size(); ++i)
          if (sent[i].defined() && clean[i].defined())
            sent[i] = as_float(sent[i]) - as_float(clean[i]);
        Change change{first->site, bits, 1, blocks_of(op.name, ""), {}, {}};
        if (change.blocks != Blocks::kRows) change.blocks = Blocks::kSamples;
        if (!send_on(node, sent, change)) return;
        std::int64_t blocks = 0;
        for (const auto& [ordinal, error] : change.at_outputs)
          blocks += blocks_in(error, change.blocks);
        if (blocks > 0) draws = std::clamp<std::int64_t>(kEnoughBlocks / blocks, 1, kMostDraws);
        changes.push_back(std::move(change));
      }
      for (const OutsideSaved& one : saved) one.stand_in->tensor = one.tensor;
      const std::lock_guard lock(mutex_);
      for (Change& change : changes) {
        change.draws = static_cast<int>(draws);
        changes_.push_back(std::move(change));
      }
    }
  }
}

std::vector<Outside::Energy> Outside::finish(const std::vector<at::Tensor>& tangents,
                                             double epsilon, const LeafWeights& weights) {
  std::vector<Energy> energies;
  std::set<const Site*> unknown;
  for (const Change& change : changes_) {
    const double once = 1 / std::sqrt(static_cast<double>(change.draws));
    for (const auto& [leaf, norm] : change.at_leaves)
      energies.push_back({change.site, change.bits, norm, once * std::sqrt(weights.of(leaf))});
    std::vector<std::pair<at::Tensor, double>> sums;  // by block, over outputs with equal blocks
    for (const auto& [ordinal, error] : change.at_outputs) {
      if (ordinal >= tangents.size() || !tangents[ordinal].defined() ||
          !tangents[ordinal].is_same_size(error)) {
        unknown.insert(change.site);
        continue;
      }
      const std::int64_t kept = kept_rows_[ordinal] > 0 ? kept_rows_[ordinal] : rows_[ordinal];
      const double part = static_cast<double>(rows_[ordinal]) /
                          static_cast<double>(std::max<std::int64_t>(kept, 1));
      at::Tensor sum = block_sums(as_float(error), as_float(tangents[ordinal]), change.blocks);
      const auto like = std::find_if(sums.begin(), sums.end(), [&](const auto& one) {
        return one.second == part && one.first.is_same_size(sum);
      });
      if (like == sums.end()) {
        sums.emplace_back(std::move(sum), part);
      } else {
        like->first = like->first + sum;
      }
    }
    for (const auto& [sum, part] : sums)
      energies.push_back(
          {change.site, change.bits, norm_of(sum), once * std::sqrt(part) / epsilon});
  }
  std::erase_if(energies, [&](const Energy& one) { return unknown.contains(one.site); });
  changes_.clear();
  return energies;
}

}  // namespace backfold::torch_layer
