// SPDX-License-Identifier: Apache-2.0
//
// Who made a storage: what the store remembers of calls that have a recipe, and what it does before
// memory is written.

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstring>

#include "torch/capture/borrowed.h"
#include "torch/reads/recipes.h"
#include "torch/store/store.h"

namespace backfold::torch_layer {
namespace {

// Whether a tensor is all that its storage holds, so that the storage's value is the tensor's.
bool fills_its_storage(const at::Tensor& tensor) {
  return tensor.storage_offset() == 0 && tensor.is_non_overlapping_and_dense() &&
         static_cast<std::size_t>(tensor.numel()) * tensor.element_size() ==
             tensor.storage().nbytes();
}

// A single element that is no part of anything larger.
bool is_number(const at::Tensor& tensor) {
  return tensor.numel() == 1 &&
         static_cast<std::int64_t>(tensor.storage().nbytes()) == tensor.element_size();
}

bool is_wrapped_number(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

}  // namespace

Tracked& Store::track(const at::Tensor& tensor) {
  Tracked*& tracked = storages_[tensor.storage().unsafeGetStorageImpl()];
  if (!tracked) tracked = &tracked_.emplace_back(tensor.storage());
  return *tracked;
}

Tracked* Store::known(const at::Tensor& tensor) const {
  const auto found = storages_.find(tensor.storage().unsafeGetStorageImpl());
  return found == storages_.end() ? nullptr : found->second;
}

Value& Store::value_at(const at::Tensor& tensor) {
  Tracked& home = track(tensor);
  const std::uint32_t version = Counter(tensor).stood_at;
  if (!home.value || home.value->version != version) {
    Value& value = values_.emplace_back(memory_.get());
    value.home = &home;
    value.write = home.writes;
    value.version = version;
    value.type = tensor.scalar_type();
    value.parameter = is_parameter(tensor);
    // The memory of a gathered parameter may be gone when another module's backward reads it.
    value.buffer = is_buffer(tensor) || (value.parameter && options_.sharded);
    value.in_graph = tensor.requires_grad();
    home.value = &value;
  }
  return *home.value;
}

void Store::add_input(std::pmr::vector<Value::Input>& inputs, const at::Tensor& tensor,
                      int position) {
  Value::Input& input = inputs.emplace_back();
  input.value = &value_at(tensor);
  input.view.sizes = tensor.sizes();
  input.view.strides = tensor.strides();
  input.view.offset = tensor.storage_offset();
  input.type = tensor.scalar_type();
  input.counter = Counter(tensor);
  input.position = position;
  if (is_number(tensor)) input.number = tensor.storage();
}

const at::Tensor& Store::number(const at::Tensor& wrapped) {
  constexpr std::size_t kMost = 16;
  const auto same = [&](const at::Tensor& known) {
    return known.scalar_type() == wrapped.scalar_type() && known.is_cpu() && wrapped.is_cpu() &&
           std::memcmp(known.const_data_ptr(), wrapped.const_data_ptr(), wrapped.nbytes()) == 0;
  };
  const auto* found = std::find_if(numbers_.begin(), numbers_.end(), same);
  if (found != numbers_.end()) return *found;
  if (numbers_.size() >= kMost) return wrapped;
  numbers_.push_back(wrapped);
  return wrapped;
}

void Store::note_overwritten(RunningCall& call) {
  if (!options_.derive || !at::GradMode::is_enabled() || call.tensors.empty()) return;
  const Borrowed borrowed(call.tensors[0].first);
  const at::Tensor& tensor = *borrowed;
  if (call.tensors[0].second != call.op->written[0] || obstacle_in(tensor)) return;
  if (fills_its_storage(tensor)) call.overwritten = &value_at(tensor);
}

void Store::record(RunningCall& call, const at::Tensor& result,
                   c10::ArrayRef<c10::IValue> results) {
  const Operator& op = *call.op;
  // Tensors outside of the graph may be written by kernels that nobody announces. A call may save
  // such a result before the one that is asked for.
  if (!options_.derive || !result.requires_grad()) return;
  if (op.product && (!options_.products || call.arguments.empty())) return;
  if (call.lap) call.lap->end();
  call.recorded = true;
  if (obstacle_in(result) || !fills_its_storage(result) ||
      static_cast<std::int64_t>(result.nbytes()) < options_.min_bytes ||
      !element_type(result.scalar_type()))
    return;
  if (!op.written.empty() && !call.overwritten) return;
  if (op.recipe->when && !op.recipe->when(Call(*op.schema, call.arguments))) return;

  std::pmr::vector<Value::Input> inputs(memory_.get());
  inputs.reserve(call.tensors.size() + static_cast<std::size_t>(op.recipe->companions));
  std::vector<c10::IValue> arguments;
  arguments.reserve(call.arguments.size());
  bool complete = true;
  const auto add = [&](const at::Tensor& tensor, int position) {
    complete = complete && !obstacle_in(tensor) && tensor.device() == result.device();
    if (!complete) return;
    const bool overwritten = call.overwritten && tensor.is_same(result);
    complete = overwritten || !tensor.is_alias_of(result);
    add_input(inputs, tensor, position);
    if (overwritten) inputs.back().value = call.overwritten;
  };
  for (std::size_t i = 0; i < call.arguments.size() && complete; ++i) {
    const int position = static_cast<int>(i);
    const c10::IValue& argument = call.arguments[i];
    if (std::find(op.left_out.begin(), op.left_out.end(), position) != op.left_out.end()) {
      arguments.emplace_back();
    } else if (argument.isTensor()) {
      const at::Tensor& tensor = argument.toTensor();
      if (!tensor.defined()) {
        arguments.push_back(argument);
      } else if (is_wrapped_number(tensor)) {
        arguments.emplace_back(number(tensor));
      } else {
        arguments.emplace_back();
        add(tensor, position);
      }
    } else if (!argument.isList()) {
      arguments.push_back(argument);
    } else if (argument.isTensorList()) {
      for (const at::Tensor& tensor : argument.toTensorVector()) add(tensor, position);
      arguments.emplace_back(c10::List<at::Tensor>());
    } else if (argument.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> places;
      for (const std::optional<at::Tensor>& tensor : argument.toOptionalTensorVector()) {
        const bool defined = tensor && tensor->defined();
        places.push_back(defined ? std::optional(at::Tensor()) : std::nullopt);
        if (defined) add(*tensor, position);
      }
      arguments.emplace_back(std::move(places));
    } else {
      arguments.push_back(argument);
    }
  }
  const Recipe& recipe = *op.recipe;
  for (int i = recipe.first_companion; i < recipe.first_companion + recipe.companions; ++i) {
    const auto index = static_cast<std::size_t>(i);
    complete = complete && index < results.size() && results[index].isTensor() &&
               results[index].toTensor().defined();
    if (complete) add(results[index].toTensor(), static_cast<int>(arguments.size()) + i);
  }
  if (!complete) return;

  Tracked& home = track(result);
  // A call inside made it (autocast calls an operator again, with other arguments) and knows best.
  if (home.value && home.value->op && home.value->version == Counter(result).stood_at) return;
  Value& value = values_.emplace_back(memory_.get());
  value.home = &home;
  value.write = home.writes;
  value.version = Counter(result).stood_at;
  value.in_graph = true;
  value.op = &op;
  value.type = result.scalar_type();
  value.device = result.device();
  value.view = view_in_span(result, 0);
  value.inputs = std::move(inputs);
  value.arguments = std::move(arguments);
  value.lap = call.lap;
  home.value = &value;
}

void Store::about_to_write(const at::Tensor& tensor) {
  if (!tensor.has_storage()) return;
  if (Tracked* tracked = known(tensor)) {
    for (const auto& weak : tracked->dependents) {
      try {
        if (const auto derived = weak.lock()) derived->keep();
      } catch (const c10::Error& error) {  // who reads it is told; the write goes on
        TORCH_WARN_ONCE("backfold: a tensor could not be kept before its source changed: ",
                        error.what_without_backtrace());
      }
    }
    tracked->dependents.clear();
    for (const Tracked::Packed& known : tracked->packets)
      if (const auto packet = known.packet.lock()) packet->forget_source();
    if (tracked->value)
      if (const auto derived = tracked->value->derived.lock()) derived->forget_original();
    tracked->value = nullptr;
    tracked->hold.reset();
    ++tracked->writes;
  }
  if (copied_.empty()) return;
  const auto copies = copied_.find(tensor.storage().unsafeGetStorageImpl());
  if (copies == copied_.end()) return;
  for (Tracked* tracked : copies->second) {
    std::shared_ptr<ParameterCopy>& copy = tracked->copy;
    if (copy.use_count() > 1) {
      copy->keep();
    } else {
      copy.reset();
    }
  }
  copied_.erase(copies);
}

}  // namespace backfold::torch_layer
