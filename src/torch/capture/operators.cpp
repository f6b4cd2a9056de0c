// SPDX-License-Identifier: Apache-2.0
//
// What the process learns of an operator when it is first called.

#include <algorithm>
#include <deque>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "torch/capture/calls.h"
#include "torch/capture/node_name.h"
#include "torch/reads/norms.h"
#include "torch/reads/recipes.h"

namespace backfold::torch_layer {
namespace {

// Operators whose results have as many elements as values say, or are numbers of the program's. Not
// repeat_interleave, which torch's attention calls with a number.
constexpr std::string_view kDeciding =
    "aten::nonzero aten::nonzero_numpy aten::argwhere aten::masked_select aten::item "
    "aten::is_nonzero aten::_local_scalar_dense aten::equal aten::allclose aten::_unique "
    "aten::_unique2 aten::unique_dim aten::unique_consecutive aten::unique_dim_consecutive "
    "aten::bincount";

bool writes(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

// How the results of an operator are made again.
void add_recipe(Operator& op) {
  const Recipe* recipe = op.schema ? recipe_of(op.name) : nullptr;
  if (!recipe || op.schema->returns().empty()) return;
  const std::string name(recipe->again.empty() ? std::string_view(op.name) : recipe->again);
  const auto again = c10::Dispatcher::singleton().findSchema({name, op.schema->overload_name()});
  // Forms that write into a tensor given for it (out=) have more arguments than the operator.
  const auto same_arguments = [&] {
    const auto& first = op.schema->arguments();
    const auto& second = again->schema().arguments();
    return std::equal(first.begin(), first.end(), second.begin(), second.end(),
                      [](const auto& a, const auto& b) { return a.name() == b.name(); }) &&
           std::none_of(second.begin(), second.end(), writes);
  };
  if (!again || !same_arguments()) return;
  op.recipe = recipe;
  op.again = again;
  op.product = recipe->product;
  op.wants_arguments |= !op.product;
  for (std::size_t i = 0; i < op.slots.size(); ++i) {
    if (recipe->exact == "*" || is_one_of(op.slots[i], recipe->exact))
      op.exact.push_back(static_cast<int>(i));
    if (is_one_of(op.slots[i], recipe->left_out)) op.left_out.push_back(static_cast<int>(i));
  }
}

// Whether torch's own kernel for autograd runs the operator: it leaves autograd before it calls
// others. Composed operators do not, nor need those of other libraries.
void add_kernels(Operator& op) {
  if (op.opaque) return;
  const auto handle =
      c10::Dispatcher::singleton().findSchema({op.name, op.schema->overload_name()});
  if (!handle) return;
  const auto has = [&](c10::DispatchKey key) { return handle->hasKernelForDispatchKey(key); };
  op.has_kernel_of_autograd =
      has(c10::DispatchKey::Autograd) && !has(c10::DispatchKey::CompositeImplicitAutograd);
  for (const c10::DispatchKey key : c10::autocast_dispatch_keyset)
    op.has_kernel_of_autocast |= has(key);
}

// Every operator seen by the process.
class Registry {
 public:
  const Operator& add(const std::string& name, std::optional<c10::FunctionSchema> schema) {
    const std::lock_guard lock(mutex_);
    // Python classes may be made again and again; what is known of them is their name.
    if (const auto known = without_schema_.find(name); !schema && known != without_schema_.end())
      return *known->second;
    Operator& op = operators_.emplace_back();
    op.name = name;
    op.id = ids_.emplace(op.name, ids_.size()).first->second;
    op.schema = std::move(schema);
    if (!op.schema) without_schema_.emplace(op.name, &op);
    op.opaque = !op.schema || !op.name.starts_with("aten::");
    op.compiled = !op.schema && op.name.find("CompiledFunction") != std::string::npos;
    op.copies = op.name == "aten::_to_copy";
    op.makes_shares = op.name == "aten::_log_softmax";
    op.decides = is_one_of(op.name, kDeciding);
    op.decides_on_masks =
        op.name == "aten::index" || op.name == "aten::index_put_" || op.name == "aten::index_put";
    op.wants_arguments = op.makes_shares || op.name == "aten::gelu";  // which of two functions
    if (op.schema) {
      for (const c10::Argument& argument : op.schema->arguments()) {
        if (writes(argument)) op.written.push_back(static_cast<int>(op.slots.size()));
        op.slots.push_back(argument.name());
      }
    }
    for (std::size_t i = 0; i < op.slots.size() && !op.norm; ++i) {
      op.norm = norm_of(op.name, op.slots[i]);
      if (op.norm) op.norm_slot = static_cast<int>(i);
    }
    op.wants_arguments |= op.norm != nullptr;
    op.argument_rules.resize(op.slots.size());
    for (const bool wildcard : {false, true}) {
      for (const Rule& rule : rules()) {
        if (rule.op != op.name || (rule.slot == "*") != wildcard) continue;
        op.wants_arguments |= rule.predicate || rule.bound || rule.when;
        for (std::size_t i = 0; i < op.slots.size(); ++i)
          if (wildcard || rule.slot == op.slots[i]) op.argument_rules[i].push_back(&rule);
        if (!op.schema) op.saved_rules.push_back(&rule);
        if (wildcard || rule.slot.starts_with("result")) op.result_rules.push_back(&rule);
      }
    }
    add_recipe(op);
    add_kernels(op);
    return op;
  }

 private:
  std::mutex mutex_;
  std::deque<Operator> operators_;
  std::unordered_map<std::string, std::uint32_t> ids_;
  std::unordered_map<std::string, const Operator*> without_schema_;
};

Registry& registry() {
  static Registry& registry = *new Registry;  // engine threads may outlive static destructors
  return registry;
}

}  // namespace

const Operator& operator_called(const at::RecordFunction& call) {
  return registry().add(call.name(), call.operator_schema());
}

const Operator& checkpoint_operator() {
  static const Operator& op = registry().add(std::string(kCheckpoint), std::nullopt);
  return op;
}

}  // namespace backfold::torch_layer
