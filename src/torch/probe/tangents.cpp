// SPDX-License-Identifier: Apache-2.0

#include "torch/probe/tangents.h"

#include "torch/probe/effect.h"
#include "torch/probe/rankings.h"

namespace backfold::torch_layer {
namespace {

// Visits the arguments whose gradients leave through an edge that does not lead to a leaf.
template <typename Function>
void for_each_input(const RunningCall& call, const Function& function) {
  for (const auto& [argument, position] : call.tensors) {
    const at::Tensor tensor(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(argument));
    if (!tensor.defined() || !tensor.requires_grad() || !tensor.grad_fn() ||
        !tensor.is_floating_point())
      continue;
    if (leaf_behind(tensor.grad_fn().get())) continue;
    function(tensor, position);
  }
}

}  // namespace

void Tangents::note(const RunningCall& call, const Site& site) {
  Moved moved{call.op, {}};
  for_each_input(call, [&](const at::Tensor& tensor, int) {
    moved.inputs.emplace_back(tensor.tensor_data(), tensor._version());
  });
  moved_.emplace(std::pair(&site, seen_[&site]++), std::move(moved));
}

std::vector<ProbedInput> Tangents::take(const RunningCall& call, const Site& site) {
  std::vector<ProbedInput> inputs;
  const auto found = moved_.find({&site, seen_[&site]++});
  const bool known = found != moved_.end() && found->second.op == call.op;
  for_each_input(call, [&](const at::Tensor& tensor, int position) {
    ProbedInput input{
        tensor.grad_fn().get(), static_cast<std::uint32_t>(tensor.output_nr()), position, {}};
    if (known && inputs.size() < found->second.inputs.size()) {
      auto& [there, version] = found->second.inputs[inputs.size()];
      if (there.is_same_size(tensor) && there._version() == version) {
        // The tangents of a whole network are as large as what it saves, so they are kept in half
        // the precision, and scaled by 1 / epsilon only after they were summed.
        const bool wide = tensor.scalar_type() == at::kDouble;
        // An element that is infinite in both passes (a mask) does not move.
        input.tangent = difference(there, tensor.tensor_data())
                            .to(wide ? at::kFloat : at::kBFloat16)
                            .nan_to_num_(0, 0, 0);
      }
      there.reset();
    }
    inputs.push_back(std::move(input));
  });
  if (known) moved_.erase(found);
  return inputs;
}

}  // namespace backfold::torch_layer
