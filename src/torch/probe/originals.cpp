// SPDX-License-Identifier: Apache-2.0

#include "torch/probe/originals.h"

#include <ATen/Functions.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <string>
#include <utility>

namespace backfold::torch_layer {
namespace {

// Positions of the arguments that an operator writes to.
struct Writes {
  std::string name;
  c10::SmallVector<int, 2> positions;
};

struct Thread {
  std::vector<std::weak_ptr<Originals>> watching;
  at::CallbackHandle handle = 0;
  // Keyed by the address of the name, as in calls.cpp.
  ska::flat_hash_map<const char*, Writes> operators;
};
thread_local Thread thread;

const Writes& writes_of(const at::RecordFunction& call) {
  const char* name = call.name();
  Writes& writes = thread.operators[name];
  if (writes.name == name) return writes;
  writes = {name, {}};
  if (const auto schema = call.operator_schema())
    for (std::size_t i = 0; i < schema->arguments().size(); ++i)
      if (const auto* alias = schema->arguments()[i].alias_info(); alias && alias->isWrite())
        writes.positions.push_back(static_cast<int>(i));
  return writes;
}

void before_write(const at::Tensor& tensor) {
  for (const auto& one : thread.watching)
    if (const auto originals = one.lock()) originals->before_write(tensor);
}

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& call) {
  if (thread.watching.empty()) return nullptr;
  const c10::ArrayRef<const c10::IValue> inputs = call.inputs();
  for (const int position : writes_of(call).positions) {
    if (static_cast<std::size_t>(position) >= inputs.size()) continue;
    const c10::IValue& input = inputs[static_cast<std::size_t>(position)];
    if (input.isTensor()) {
      before_write(input.toTensor());
    } else if (input.isTensorList()) {
      for (const at::Tensor& tensor : input.toTensorVector()) before_write(tensor);
    }
  }
  return nullptr;
}

bool is_writable(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.is_nested() ||
      tensor.is_quantized() || tensor.is_inference() || !tensor.has_storage())
    return false;
  for (std::int64_t i = 0; i < tensor.dim(); ++i)
    if (tensor.stride(i) == 0 && tensor.size(i) > 1) return false;
  return true;
}

const void* storage_of(const at::Tensor& tensor) { return tensor.storage().unsafeGetStorageImpl(); }

// Hides copies from autograd and from callbacks that watch calls.
struct Unobserved {
  const at::AutoGradMode no_grad{false};
  const at::DisableRecordFunctionGuard no_callbacks;
};

bool is_same_memory(const at::Tensor& a, const at::Tensor& b) {
  return storage_of(a) == storage_of(b) && a.storage_offset() == b.storage_offset() &&
         a.sizes() == b.sizes() && a.strides() == b.strides();
}

}  // namespace

Originals::Originals(const std::vector<at::Tensor>& tensors) {
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    if (!is_writable(tensor)) continue;
    by_storage_.emplace(storage_of(tensor), entries_.size());
    entries_.push_back({.index = i, .tensor = tensor, .alias = tensor.variable_data()});
  }
}

void Originals::watch() {
  for (Entry& entry : entries_) entry.version = entry.tensor._version();
  watches_ = true;
  if (thread.watching.empty())
    thread.handle = at::addThreadLocalCallback(
        at::RecordFunctionCallback(begin).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  thread.watching.push_back(weak_from_this());
}

void Originals::stop() {
  if (!watches_) return;
  watches_ = false;
  std::erase_if(thread.watching, [this](const std::weak_ptr<Originals>& one) {
    return one.expired() || one.lock().get() == this;
  });
  if (thread.watching.empty()) at::removeCallback(thread.handle);
  for (Entry& entry : entries_) {
    const bool replaced = !is_same_memory(entry.tensor, entry.alias);
    entry.failed |= entry.version != entry.tensor._version() && !entry.copy.defined() && !replaced;
    entry.version = entry.tensor._version();
    entry.memory = storage_of(entry.tensor);
  }
}

void Originals::before_write(const at::Tensor& tensor) noexcept {
  if (!tensor.defined() || !tensor.has_storage()) return;
  const auto [begin, end] = by_storage_.equal_range(storage_of(tensor));
  for (auto found = begin; found != end; ++found) {
    Entry& entry = entries_[found->second];
    if (entry.copy.defined() || entry.failed) continue;
    try {
      const Unobserved unobserved;
      entry.copy = entry.alias.clone(at::MemoryFormat::Preserve);
    } catch (...) {  // out of memory
      entry.failed = true;
    }
  }
}

std::vector<std::size_t> Originals::unseen() const {
  std::vector<std::size_t> found;
  for (const Entry& entry : entries_)
    if (entry.failed) found.push_back(entry.index);
  return found;
}

void Originals::exchange(Entry& entry) {
  if (!is_same_memory(entry.tensor, entry.alias)) {
    if (entry.copy.defined()) entry.alias.copy_(entry.copy);
    entry.copy.reset();
    const at::Tensor now = entry.tensor.variable_data();
    entry.tensor.set_data(entry.alias);
    entry.alias = now;
  } else if (entry.copy.defined()) {
    const at::Tensor now = entry.alias.clone(at::MemoryFormat::Preserve);
    entry.alias.copy_(entry.copy);
    entry.copy = now;
  }
}

void Originals::restore() {
  const Unobserved unobserved;
  for (Entry& entry : entries_) {
    if (entry.copy.defined()) entry.alias.copy_(entry.copy);
    if (!is_same_memory(entry.tensor, entry.alias)) entry.tensor.set_data(entry.alias);
  }
}

void Originals::rewind() {
  const Unobserved unobserved;
  for (Entry& entry : entries_) {
    if (entry.version != entry.tensor._version() || entry.memory != storage_of(entry.tensor))
      continue;
    exchange(entry);
    entry.exchanged = true;
  }
}

void Originals::return_from_rewind() {
  const Unobserved unobserved;
  // In reverse order: of two tensors that share memory, the first has the right values.
  for (auto entry = entries_.rbegin(); entry != entries_.rend(); ++entry)
    if (std::exchange(entry->exchanged, false)) exchange(*entry);
}

}  // namespace backfold::torch_layer
