// SPDX-License-Identifier: Apache-2.0

#include "torch/probe/closed_form.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <algorithm>
#include <string_view>

#include "torch/probe/gains.h"
#include "torch/probe/leaf_weights.h"

namespace backfold::torch_layer {
namespace {

struct Form {
  std::string_view op, input, weight;
};

constexpr Form kForms[] = {{"aten::addmm", "mat1", "mat2"},
                           {"aten::mm", "self", "mat2"},
                           {"aten::convolution", "input", "weight"}};

bool is_convolution(const Operator& op) { return op.name == "aten::convolution"; }

}  // namespace

bool has_closed_form(const RunningCall& call, const Site& site) {
  const auto form = std::find_if(std::begin(kForms), std::end(kForms), [&](const Form& one) {
    return call.op->name == one.op && site.slot == one.input;
  });
  if (form == std::end(kForms)) return false;
  if (is_convolution(*call.op) &&
      (call.arguments.empty() || Call(*call.op->schema, call.arguments)["transposed"].toBool()))
    return false;
  for (const auto& [argument, position] : call.tensors) {
    if (call.op->slots[static_cast<std::size_t>(position)] != form->weight) continue;
    const at::Tensor weight(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(argument));
    return weight.is_leaf() || leaf_behind(weight.grad_fn().get());
  }
  return false;
}

at::Tensor weight_of_closed_form(const Operator& op, c10::ArrayRef<c10::IValue> arguments) {
  const auto form = std::find_if(std::begin(kForms), std::end(kForms),
                                 [&](const Form& one) { return op.name == one.op; });
  const at::Tensor weight = Call(*op.schema, arguments)[form->weight].toTensor();
  return weight.is_leaf() ? weight : *leaf_behind(weight.grad_fn().get());
}

at::Tensor energies_by_row(const Operator& op, c10::ArrayRef<c10::IValue> arguments,
                           const at::Tensor& error) {
  const at::Tensor energies = as_float(error).square();
  if (!is_convolution(op)) return energies.sum(1);
  const std::int64_t groups = Call(*op.schema, arguments)["groups"].toInt();
  return energies.unflatten(1, {groups, energies.size(1) / groups}).sum(2);
}

at::Tensor closed_form(const Operator& op, c10::ArrayRef<c10::IValue> arguments,
                       const at::Tensor& gradient, const at::Tensor& errors) {
  const at::Tensor weights = energies_by_row(op, arguments, gradient);
  if (!is_convolution(op)) return at::mv(errors, weights);
  const Call call(*op.schema, arguments);
  // Each pixel of the input meets every pixel of the output that the kernel connects it to, so the
  // sum is a convolution of energies with ones.
  std::vector<std::int64_t> kernel = call["weight"].toTensor().sizes().vec();
  kernel[0] = errors.size(2);
  kernel[1] = 1;
  const at::Tensor reached = at::convolution(
      errors.flatten(0, 1), at::ones(kernel, errors.options()), std::nullopt,
      call["stride"].toIntVector(), call["padding"].toIntVector(), call["dilation"].toIntVector(),
      false, std::vector<std::int64_t>(kernel.size() - 2, 0), errors.size(2));
  return at::mv(reached.reshape({errors.size(0), -1}), weights.reshape({-1}));
}

}  // namespace backfold::torch_layer
