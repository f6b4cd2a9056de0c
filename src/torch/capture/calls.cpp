// SPDX-License-Identifier: Apache-2.0

#include "torch/capture/calls.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "torch/capture/node_name.h"
#include "torch/reads/norms.h"
#include "torch/reads/recipes.h"

namespace backfold::torch_layer {
namespace {

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
  op.wants_arguments = true;
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
  const Operator& add(const at::RecordFunction& call) {
    const std::lock_guard lock(mutex_);
    std::optional<c10::FunctionSchema> schema = call.operator_schema();
    // Python classes may be made again and again; what is known of them is their name.
    if (const auto known = without_schema_.find(call.name());
        !schema && known != without_schema_.end())
      return *known->second;
    Operator& op = operators_.emplace_back();
    op.name = call.name();
    op.id = ids_.emplace(op.name, ids_.size()).first->second;
    op.schema = std::move(schema);
    if (!op.schema) without_schema_.emplace(op.name, &op);
    op.opaque = !op.schema || !op.name.starts_with("aten::");
    op.compiled = !op.schema && op.name.find("CompiledFunction") != std::string::npos;
    op.copies = op.name == "aten::_to_copy";
    op.makes_shares = op.name == "aten::_log_softmax";
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
  static Registry& instance = *new Registry;  // engine threads may outlive static destructors
  return instance;
}

struct Thread {
  // [0, depth) are running; the others keep their memory. Who observes a call runs operators while
  // it has a reference, so they stay where they are.
  std::deque<RunningCall> calls;
  std::size_t depth = 0;
  int watches = 0;
  at::CallbackHandle handle = 0;
  BeginObserver begin_observer = nullptr;
  EndObserver end_observer = nullptr;
  // By the address of the name, which belongs to a schema and is the quickest key. An address may
  // be used again (names of Python classes come and go), so the name is compared, too.
  ska::flat_hash_map<const char*, const Operator*> operators;
};

thread_local Thread thread;
CopyObserver copy_observer = nullptr;
WaitingObserver waiting_observer = nullptr;
WriteObserver write_observer = nullptr;
OverwriteObserver overwrite_observer = nullptr;
MadeObserver made_observer = nullptr;
RegionObserver region_observer = nullptr;

// Whether a kernel runs below autograd: what it calls is its own business.
bool is_inside() {
  // Not AutogradCPU: kernels exclude the functionality, for no backend in particular.
  return c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutogradFunctionality);
}

// Whether all that a call will call runs below autograd. A tensor or a mode that handles operators
// itself, a transform of functions and autocast may call anything first.
bool closes(const RunningCall& call) {
  if (!call.op->has_kernel_of_autograd) return false;
  const c10::impl::LocalDispatchKeySet local = c10::impl::tls_local_dispatch_key_set();
  if (!(local.included_ - c10::default_included_set).empty()) return false;
  if (call.op->has_kernel_of_autocast && !(c10::autocast_dispatch_keyset - local.excluded_).empty())
    return false;
  return std::none_of(call.tensors.begin(), call.tensors.end(), [](const auto& argument) {
    return argument.first->key_set().has(c10::DispatchKey::Python);
  });
}

const Operator* operator_of(const at::RecordFunction& call) {
  const char* name = call.name();
  const Operator*& op = thread.operators[name];
  if (!op || std::strcmp(op->name.c_str(), name) != 0) op = &registry().add(call);
  return op;
}

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& call) {
  if (call.scope() == at::RecordScope::USER_SCOPE) {
    if (region_observer) region_observer(call.name());
    return nullptr;
  }
  if (thread.depth > 0) {
    const RunningCall& outer = thread.calls[thread.depth - 1];
    if (outer.is_closed && is_inside()) outer.op->calls_below_autograd = true;
  }
  if (thread.depth == thread.calls.size()) thread.calls.emplace_back();
  RunningCall& running = thread.calls[thread.depth++];
  running.op = operator_of(call);
  running.saves = running.results = 0;
  running.saved = false;
  running.note = -1;
  running.sampled.clear();
  running.waiting.clear();
  running.tensors.clear();
  running.recorded = false;
  running.overwritten = nullptr;
  const c10::ArrayRef<const c10::IValue> inputs = call.inputs();
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const auto note = [&](const at::Tensor& tensor) {
      if (tensor.defined())
        running.tensors.emplace_back(tensor.unsafeGetTensorImpl(), static_cast<int>(i));
    };
    if (inputs[i].isTensor()) {
      note(inputs[i].toTensor());
    } else if (inputs[i].isTensorList()) {
      for (const at::Tensor& tensor : inputs[i].toTensorVector()) note(tensor);
    } else if (inputs[i].isOptionalTensorList()) {
      for (const c10::IValue& entry : inputs[i].toListRef())
        if (entry.isTensor()) note(entry.toTensor());
    }
  }
  if (running.op->recipe && !running.op->written.empty() && overwrite_observer && !is_inside())
    overwrite_observer(running);
  if (write_observer) {
    const auto tell = [&](c10::ArrayRef<int> written) {
      for (const int at : written)
        for (const auto& [argument, position] : running.tensors)
          if (position == at)
            write_observer(at::Tensor(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(argument)));
    };
    tell(running.op->written);
    tell(running.op->left_out);  // batch norms write their statistics, whatever the schema says
  }
  if (running.op->wants_arguments || running.op->copies || thread.begin_observer)
    running.arguments.assign(inputs.begin(), inputs.end());
  if (thread.begin_observer) thread.begin_observer(running);
  running.is_closed = !thread.begin_observer && !thread.end_observer && closes(running);
  // A backward inside a watch takes the callback to threads of the engine, which have no handle.
  running.is_unwatched =
      running.is_closed && running.op->calls_below_autograd && thread.watches > 0;
  if (running.is_unwatched) at::disableCallback(thread.handle);
  return nullptr;
}

void end(const at::RecordFunction& call, at::ObserverContext*) {
  if (call.scope() == at::RecordScope::USER_SCOPE) {
    if (region_observer) region_observer(nullptr);
    return;
  }
  if (thread.depth == 0) return;
  RunningCall& running = thread.calls[thread.depth - 1];
  if (std::exchange(running.is_unwatched, false)) at::reenableCallback(thread.handle);
  // Last of all: what observers run would take its place.
  const auto ended = c10::make_scope_exit([&] {
    running.arguments.clear();
    --thread.depth;
  });
  if (running.op->copies && copy_observer && !running.arguments.empty() &&
      call.outputs().size() == 1 && running.arguments[0].isTensor() &&
      call.outputs()[0].isTensor()) {
    copy_observer(running.arguments[0].toTensor(), call.outputs()[0].toTensor());
  }
  if (running.op->recipe && !running.recorded && made_observer && !is_inside())
    made_observer(running, call.outputs());
  if (!running.waiting.empty() && waiting_observer) waiting_observer(running, call.outputs());
  running.waiting.clear();
  if (thread.end_observer) thread.end_observer(running, call.outputs());
}

}  // namespace

RunningCall* running_call() { return thread.depth ? &thread.calls[thread.depth - 1] : nullptr; }

void observe_copies(CopyObserver observer) { copy_observer = observer; }
void observe_waiting(WaitingObserver observer) { waiting_observer = observer; }
void observe_writes(WriteObserver observer) { write_observer = observer; }
void observe_recipes(OverwriteObserver overwrite, MadeObserver made) {
  overwrite_observer = overwrite;
  made_observer = made;
}
void observe_regions(RegionObserver observer) { region_observer = observer; }
void observe_calls(BeginObserver begin, EndObserver end) {
  thread.begin_observer = begin;
  thread.end_observer = end;
}

CallWatch::CallWatch() : depth_(thread.depth) {
  if (thread.watches++ > 0) return;
  thread.handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback(begin, end)
          .needsInputs(true)
          .needsOutputs(true)
          .scopes({at::RecordScope::FUNCTION, at::RecordScope::USER_SCOPE}));
}

CallWatch::~CallWatch() {
  // Calls that an exception left, or that run on beyond the watch, are no longer known.
  for (std::size_t i = depth_; i < thread.calls.size(); ++i) {
    if (std::exchange(thread.calls[i].is_unwatched, false)) at::reenableCallback(thread.handle);
    thread.calls[i].arguments.clear();
    thread.calls[i].waiting.clear();
  }
  thread.depth = std::min(thread.depth, depth_);
  if (--thread.watches == 0) at::removeCallback(thread.handle);
}

}  // namespace backfold::torch_layer
