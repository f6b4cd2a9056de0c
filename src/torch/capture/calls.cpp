// SPDX-License-Identifier: Apache-2.0

#include "torch/capture/calls.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <utility>

#include "torch/capture/borrowed.h"
#include "torch/capture/lap.h"

namespace backfold::torch_layer {
namespace {

// An operator as a thread knows it.
struct KnownOperator {
  const Operator* op = nullptr;
  c10::SmallVector<int, 6> tensors;  // positions of arguments that tensors may be in
};

struct Thread {
  // [0, depth) are running; the others keep their memory. Who observes a call runs operators while
  // it has a reference, so they stay where they are.
  std::deque<RunningCall> calls;
  std::size_t depth = 0;
  int watches = 0;
  int unwatched = 0;
  at::CallbackHandle calls_handle = 0, regions_handle = 0;
  BeginObserver begin_observer = nullptr;
  EndObserver end_observer = nullptr;
  ProductWatch products;
  // By the address of the name, which belongs to a schema and is the quickest key. An address may
  // be used again (names of Python classes come and go), so the name is compared, too.
  ska::flat_hash_map<const char*, KnownOperator> operators;
};

// One that needs no initialisation, so that a thread is looked up once and not twice.
thread_local Thread* known_thread = nullptr;

// Called once where it is needed: a compiler looks up a variable of the thread at each use.
[[gnu::noinline]] Thread& this_thread() {
  Thread*& known = known_thread;
  if (!known) {
    static thread_local Thread thread;
    known = &thread;
  }
  return *known;
}

CopyObserver copy_observer = nullptr;
WaitingObserver waiting_observer = nullptr;
WriteObserver write_observer = nullptr;
OverwriteObserver overwrite_observer = nullptr;
MadeObserver made_observer = nullptr;
RegionObserver region_observer = nullptr;
DecisionObserver decision_observer = nullptr;

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

bool takes_mask(const RunningCall& call) {
  return std::any_of(call.tensors.begin(), call.tensors.end(), [](const auto& argument) {
    return argument.first->dtype() == caffe2::TypeMeta::Make<bool>();
  });
}

// Tensors, lists and optional ones of them, and types that may be any.
bool may_hold_tensors(const c10::Type& type) {
  switch (type.kind()) {
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
    case c10::TypeKind::FloatType:
    case c10::TypeKind::BoolType:
    case c10::TypeKind::NumberType:
    case c10::TypeKind::StringType:
    case c10::TypeKind::GeneratorType:
    case c10::TypeKind::DeviceObjType:
      return false;
    case c10::TypeKind::OptionalType:
    case c10::TypeKind::ListType:
      return may_hold_tensors(*type.containedType(0));
    default:
      return true;
  }
}

[[gnu::noinline]] void learn(const at::RecordFunction& call, KnownOperator& known) {
  known.op = &operator_called(call);
  known.tensors.clear();
  if (!known.op->schema) return;
  const auto& arguments = known.op->schema->arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i)
    if (may_hold_tensors(*arguments[i].real_type())) known.tensors.push_back(static_cast<int>(i));
}

const KnownOperator& operator_of(const at::RecordFunction& call, Thread& thread) {
  const char* name = call.name();
  KnownOperator& known = thread.operators[name];
  if (!known.op || std::strcmp(known.op->name.c_str(), name) != 0) learn(call, known);
  return known;
}

void note_tensor(const at::Tensor& tensor, int position, RunningCall& running) {
  if (tensor.defined()) running.tensors.emplace_back(tensor.unsafeGetTensorImpl(), position);
}

[[gnu::noinline]] void note_listed_tensors(const c10::IValue& input, int position,
                                           RunningCall& running) {
  if (input.isTensorList()) {
    for (const at::Tensor& tensor : input.toTensorVector()) note_tensor(tensor, position, running);
  } else if (input.isOptionalTensorList()) {
    for (const c10::IValue& entry : input.toListRef())
      if (entry.isTensor()) note_tensor(entry.toTensor(), position, running);
  }
}

void note_tensors(const c10::IValue& input, int position, RunningCall& running) {
  if (input.isTensor()) {
    note_tensor(input.toTensor(), position, running);
  } else if (input.isList()) {
    note_listed_tensors(input, position, running);
  }
}

// Without gradients a call of torch's own saves nothing and is not recorded. What it writes, and
// that shapes follow from it, is seen as ever. Operators of others may turn gradients on inside.
bool is_quiet(const Operator& op, const Thread& thread) {
  return !at::GradMode::is_enabled() && !op.opaque && !op.copies && !thread.begin_observer &&
         !thread.end_observer;
}

// Whether the tensors of a quiet call have to be looked at.
bool needs_tensors(const Operator& op) {
  return !op.written.empty() || !op.left_out.empty() || op.decides_on_masks ||
         op.calls_below_autograd;
}

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& call) {
  Thread& thread = this_thread();
  if (thread.unwatched > 0) return nullptr;
  if (thread.depth > 0) {
    const RunningCall& outer = thread.calls[thread.depth - 1];
    if (outer.is_closed && is_inside()) outer.op->calls_below_autograd = true;
  }
  if (thread.depth == thread.calls.size()) thread.calls.emplace_back();
  RunningCall& running = thread.calls[thread.depth++];
  const KnownOperator& known = operator_of(call, thread);
  running.op = known.op;
  running.saves = running.results = 0;
  running.saved = false;
  running.note = -1;
  running.sampled.clear();
  running.waiting.clear();
  running.tensors.clear();
  running.overwritten = nullptr;
  const bool quiet = is_quiet(*running.op, thread);
  running.recorded = quiet;  // there is nothing to record
  if (quiet && !needs_tensors(*running.op)) {
    running.is_closed = running.op->has_kernel_of_autograd;
    if (decision_observer && running.op->decides) decision_observer();
    // Nobody asks for them. But a kernel that counts references to its tensors takes Python's lock
    // for the second one of each, which is here already: 700 instructions more for a sum without.
    if (running.op->wants_arguments)
      running.arguments.assign(call.inputs().begin(), call.inputs().end());
    return nullptr;
  }
  const c10::ArrayRef<const c10::IValue> inputs = call.inputs();
  if (running.op->schema && inputs.size() == running.op->slots.size()) {
    for (const int i : known.tensors) note_tensors(inputs[i], i, running);
  } else {
    for (std::size_t i = 0; i < inputs.size(); ++i)
      note_tensors(inputs[i], static_cast<int>(i), running);
  }
  if (running.op->recipe && !running.op->written.empty() && overwrite_observer && !quiet &&
      !is_inside())
    overwrite_observer(running);
  if (write_observer) {
    const auto tell = [&](c10::ArrayRef<int> written) {
      for (const int at : written)
        for (const auto& [argument, position] : running.tensors)
          if (position == at) write_observer(*Borrowed(argument));
    };
    tell(running.op->written);
    tell(running.op->left_out);  // batch norms write their statistics, whatever the schema says
  }
  if (decision_observer &&
      (running.op->decides || (running.op->decides_on_masks && takes_mask(running))))
    decision_observer();
  const bool product = running.op->product && thread.products.records && !quiet && !is_inside();
  if (running.op->wants_arguments || running.op->copies || product || thread.begin_observer)
    running.arguments.assign(inputs.begin(), inputs.end());
  if (thread.begin_observer) thread.begin_observer(running);
  running.is_closed = !thread.begin_observer && !thread.end_observer && closes(running);
  // A backward inside a watch takes the callback to threads of the engine, which have no handle.
  running.is_unwatched =
      running.is_closed && running.op->calls_below_autograd && thread.watches > 0;
  if (running.is_unwatched) at::disableCallback(thread.calls_handle);
  if (product && thread.products.times && !running.tensors.empty())
    running.lap = std::make_shared<Lap>(running.tensors[0].first->device());
  return nullptr;
}

void end(const at::RecordFunction& call, at::ObserverContext*) {
  Thread& thread = this_thread();
  if (thread.depth == 0 || thread.unwatched > 0) return;
  RunningCall& running = thread.calls[thread.depth - 1];
  if (std::exchange(running.is_unwatched, false)) at::reenableCallback(thread.calls_handle);
  // Last of all: what observers run would take its place.
  const auto ended = c10::make_scope_exit([&] {
    running.arguments.clear();
    running.lap.reset();
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

std::unique_ptr<at::ObserverContext> region_begins(const at::RecordFunction& region) {
  if (region_observer) region_observer(region.name());
  return nullptr;
}

void region_ends(const at::RecordFunction&, at::ObserverContext*) {
  if (region_observer) region_observer(nullptr);
}

}  // namespace

RunningCall* running_call() {
  Thread& thread = this_thread();
  return thread.depth ? &thread.calls[thread.depth - 1] : nullptr;
}

void observe_copies(CopyObserver observer) { copy_observer = observer; }
void observe_waiting(WaitingObserver observer) { waiting_observer = observer; }
void observe_writes(WriteObserver observer) { write_observer = observer; }
void observe_recipes(OverwriteObserver overwrite, MadeObserver made) {
  overwrite_observer = overwrite;
  made_observer = made;
}
void observe_regions(RegionObserver observer) { region_observer = observer; }
void observe_decisions(DecisionObserver observer) { decision_observer = observer; }
void watch_products(ProductWatch watch) { this_thread().products = watch; }
void observe_calls(BeginObserver begin, EndObserver end) {
  this_thread().begin_observer = begin;
  this_thread().end_observer = end;
}

CallWatch::CallWatch() : depth_(this_thread().depth) {
  Thread& thread = this_thread();
  if (thread.watches++ > 0) return;
  // Two callbacks: torch prepares each scope of one anew whenever it is switched.
  thread.calls_handle = at::addThreadLocalCallback(at::RecordFunctionCallback(begin, end)
                                                       .needsInputs(true)
                                                       .needsOutputs(true)
                                                       .scopes({at::RecordScope::FUNCTION}));
  thread.regions_handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback(region_begins, region_ends).scopes({at::RecordScope::USER_SCOPE}));
}

CallWatch::~CallWatch() {
  Thread& thread = this_thread();
  // Calls that an exception left, or that run on beyond the watch, are no longer known.
  for (std::size_t i = depth_; i < thread.calls.size(); ++i) {
    if (std::exchange(thread.calls[i].is_unwatched, false))
      at::reenableCallback(thread.calls_handle);
    thread.calls[i].arguments.clear();
    thread.calls[i].waiting.clear();
    thread.calls[i].lap.reset();
  }
  thread.depth = std::min(thread.depth, depth_);
  if (--thread.watches > 0) return;
  at::removeCallback(thread.calls_handle);
  at::removeCallback(thread.regions_handle);
}

Unwatched::Unwatched() { ++this_thread().unwatched; }
Unwatched::~Unwatched() { --this_thread().unwatched; }

}  // namespace backfold::torch_layer
