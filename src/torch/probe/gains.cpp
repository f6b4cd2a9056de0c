// SPDX-License-Identifier: Apache-2.0

#include "torch/probe/gains.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <cmath>
#include <map>

namespace backfold::torch_layer {

at::Tensor as_float(const at::Tensor& tensor) {
  const bool wide = tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kDouble;
  return wide ? tensor : tensor.to(at::kFloat);
}

at::Tensor norm_of(const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided || tensor.is_complex())
    return at::zeros({}, at::TensorOptions(at::kFloat).device(tensor.device()));
  return at::linalg_vector_norm(tensor, 2, std::nullopt, false,
                                tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
}

std::vector<double> read_energies(const std::vector<at::Tensor>& norms) {
  std::map<std::string, std::vector<std::size_t>> by_device;
  std::vector<std::size_t> begins;
  std::size_t count = 0;
  for (std::size_t i = 0; i < norms.size(); ++i) {
    by_device[norms[i].device().str()].push_back(i);
    begins.push_back(count);
    count += static_cast<std::size_t>(norms[i].numel());
  }
  std::vector<double> energies(count);
  for (const auto& [device, indices] : by_device) {
    std::vector<at::Tensor> flat;
    for (const std::size_t i : indices) flat.push_back(norms[i].reshape({-1}).to(at::kFloat));
    const at::Tensor read = at::cat(flat).cpu().to(at::kDouble).square();
    const double* value = read.const_data_ptr<double>();
    for (const std::size_t i : indices)
      for (std::int64_t k = 0; k < norms[i].numel(); ++k)
        energies[begins[i] + static_cast<std::size_t>(k)] = *value++;
  }
  return energies;
}

void Gains::record(const torch::autograd::Node& node, const std::vector<at::Tensor>& inputs,
                   const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& clean) {
  if (!wanted_) return;
  Record record;
  record.node = &node;
  std::vector<at::Tensor> parts, without_noise;
  for (const at::Tensor& input : inputs)
    if (input.defined()) parts.push_back(norm_of(input));
  if (parts.empty()) return;
  record.norms.push_back(parts.size() == 1 ? parts[0] : norm_of(at::stack(parts)));
  for (std::size_t i = 0; i < outputs.size() && i < node.num_outputs(); ++i) {
    const auto& next = node.next_edge(i).function;
    if (!outputs[i].defined() || !next) continue;
    record.next.push_back(next.get());
    record.norms.push_back(norm_of(outputs[i]));
    without_noise.push_back(&outputs == &clean || !clean[i].defined() ? record.norms.back()
                                                                      : norm_of(clean[i]));
    if (const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(next.get()))
      met_.try_emplace(next.get(), leaf->variable);
  }
  record.norms.insert(record.norms.end(), without_noise.begin(), without_noise.end());
  records_.push_back(std::move(record));
}

void Gains::settle(double rest, const LeafWeights& weights) {
  rest_ = rest;
  for (const auto& [node, leaf] : met_) leaves_[node] = weights.of(leaf);
  met_.clear();
  std::vector<at::Tensor> all;
  for (const Record& record : records_)
    all.insert(all.end(), record.norms.begin(), record.norms.end());
  const std::vector<double> values = all.empty() ? std::vector<double>() : read_energies(all);
  std::size_t end = values.size();
  for (auto record = records_.rbegin(); record != records_.rend(); ++record) {
    const std::size_t begin = end - record->norms.size();
    Settled& settled = settled_[record->node];
    const std::size_t edges = record->next.size();
    double clean = 0;
    for (std::size_t i = 0; i < edges; ++i) {
      const double gain = of(record->next[i]);
      settled.sent += values[begin + 1 + i] * gain;
      clean += values[begin + 1 + edges + i] * gain / amplification(record->next[i]);
    }
    if (values[begin] > 0) {
      settled.gain = settled.sent / values[begin];
      settled.clean_gain = clean / values[begin];
    }
    end = begin;
  }
  records_.clear();
}

double Gains::of(const torch::autograd::Node* node) const {
  if (const auto leaf = leaves_.find(node); leaf != leaves_.end()) return leaf->second;
  const auto found = settled_.find(node);
  if (found == settled_.end()) return rest_;
  return std::isfinite(found->second.gain) ? found->second.gain : 0;
}

double Gains::amplification(const torch::autograd::Node* node) const {
  const auto found = settled_.find(node);
  if (found == settled_.end()) return 1;
  const double factor = found->second.gain / found->second.clean_gain;
  return std::isfinite(factor) && factor > 0 ? factor : 1;
}

double Gains::sent_by(const torch::autograd::Node* node) const {
  const auto found = settled_.find(node);
  return found == settled_.end() || !std::isfinite(found->second.sent) ? 0 : found->second.sent;
}

}  // namespace backfold::torch_layer
