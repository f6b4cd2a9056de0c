// SPDX-License-Identifier: Apache-2.0
//
// Which operator is running: what names the place where a tensor is saved.
//
// torch reports every operator call on a thread to a callback. The innermost call that is running
// when autograd saves a tensor is the one whose backward node will read it.

#ifndef BACKFOLD_TORCH_CAPTURE_CALLS_H_
#define BACKFOLD_TORCH_CAPTURE_CALLS_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/function_schema.h>
#include <ATen/record_function.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "torch/reads/exact_ops.h"

namespace backfold::torch_layer {

class Lap;
class SharedPacket;
struct Norm;
struct Recipe;
struct Site;
struct Value;

// What an operator is, learned at its first call. Lives as long as the process.
struct Operator {
  std::string name;      // "aten::addmm", or the class of a Python autograd.Function
  std::uint32_t id = 0;  // the same for all overloads of a name
  std::optional<c10::FunctionSchema> schema;
  std::vector<std::string> slots;  // names of the arguments, by position
  // Rows of the table, those of a slot's own name first: a row may be for some calls alone.
  std::vector<std::vector<const Rule*>> argument_rules;  // by position
  std::vector<const Rule*> result_rules;
  std::vector<const Rule*> saved_rules;  // of a function, which has no names for its arguments
  c10::SmallVector<int, 1> written;      // positions of arguments that it writes
  bool opaque = false;                   // its backward is unknown
  bool compiled = false;                 // a graph of torch.compile
  bool copies = false;            // aten::_to_copy, which makes low-precision copies of parameters
  bool wants_arguments = false;   // a rule looks at the arguments of a call
  bool makes_shares = false;      // aten::_log_softmax, whose shares add up to 1
  bool decides = false;           // shapes follow from its result, or from what Python does with it
  bool decides_on_masks = false;  // the same if an argument is a mask
  // The norm that it is of one of its arguments, by position.
  const Norm* norm = nullptr;
  int norm_slot = -1;
  // How its first result can be made again, if it can, and by which operator. Positions of
  // arguments that must not be rounded, and of those that are left out the second time.
  const Recipe* recipe = nullptr;
  std::optional<c10::OperatorHandle> again;
  c10::SmallVector<int, 2> exact, left_out;
  bool product = false;  // whose recipe is watched only where a plan may want it
  // What its kernel calls below autograd saves nothing and is not watched. Seen first, then
  // skipped.
  bool has_kernel_of_autograd = false, has_kernel_of_autocast = false;
  mutable std::atomic<bool> calls_below_autograd = false;
};

// The operator of a call that is seen for the first time on this thread.
const Operator& operator_called(const at::RecordFunction& call);

// Stands for torch.utils.checkpoint where no call announces that it saves its inputs.
const Operator& checkpoint_operator();

struct RunningCall {
  const Operator* op = nullptr;
  // Arguments that are tensors, with their positions. Alive as long as the call runs.
  c10::SmallVector<std::pair<c10::TensorImpl*, int>, 8> tensors;
  std::vector<c10::IValue> arguments;  // copies, where the operator wants them
  int saves = 0;                       // tensors saved so far
  int results = 0;                     // of them, those that are no argument
  std::int64_t note = -1;              // of whoever observes the end of calls
  bool saved = false;                  // anything
  c10::SmallVector<Site*, 1> sampled;  // where gradients of samples are wanted
  // That are packed when the call ends, by statistics that it makes.
  c10::SmallVector<std::shared_ptr<SharedPacket>, 1> waiting;
  bool recorded = false;         // how its result was made
  Value* overwritten = nullptr;  // that it writes over
  std::shared_ptr<Lap> lap;      // of a product that is timed
  bool is_closed = false;        // all that it calls runs below autograd
  bool is_unwatched = false;     // so that no callback sees it
};

// The innermost call on this thread; null outside of calls. Valid until the call ends.
RunningCall* running_call();

// Told of each tensor that aten::_to_copy makes on this thread while a watch is active.
using CopyObserver = void (*)(const at::Tensor& source, const at::Tensor& copy);
void observe_copies(CopyObserver observer);

// Told when a call ends that packets wait for, with what it made: nothing where it failed.
using WaitingObserver = void (*)(const RunningCall& call, c10::ArrayRef<c10::IValue> results);
void observe_waiting(WaitingObserver observer);

// Told of each tensor that a call is about to write on this thread while a watch is active.
using WriteObserver = void (*)(const at::Tensor& tensor);
void observe_writes(WriteObserver observer);

// Told of calls that have a recipe and that autograd sees: when one that writes an argument begins,
// before it does, and when one ends, with what it made.
using OverwriteObserver = void (*)(RunningCall& call);
using MadeObserver = void (*)(RunningCall& call, c10::ArrayRef<c10::IValue> results);
void observe_recipes(OverwriteObserver overwrite, MadeObserver made);

// Whether calls of products on this thread keep their arguments, so that they can be recorded, and
// whether they are timed.
struct ProductWatch {
  bool records = false, times = false;
};
void watch_products(ProductWatch watch);

// Told when a region that the program names (RECORD_USER_SCOPE) begins, with its name, and when it
// ends, with null.
using RegionObserver = void (*)(const char* name);
void observe_regions(RegionObserver observer);

// Told when a call begins after which shapes depend on values.
using DecisionObserver = void (*)();
void observe_decisions(DecisionObserver observer);

// Told of each call on this thread while a watch is active: when it begins, with its arguments in
// place, and when it ends, with what it made (its arguments may be gone then). Nulls end it.
using BeginObserver = void (*)(const RunningCall& call);
using EndObserver = void (*)(const RunningCall& call, c10::ArrayRef<c10::IValue> results);
void observe_calls(BeginObserver begin, EndObserver end);

// While one lives on a thread, calls of that thread are nobody's business: nobody is told of them.
class Unwatched {
 public:
  Unwatched();
  ~Unwatched();
  Unwatched(const Unwatched&) = delete;
  Unwatched& operator=(const Unwatched&) = delete;
};

// While one lives on a thread, running_call() knows the calls of that thread.
class CallWatch {
 public:
  CallWatch();
  ~CallWatch();
  CallWatch(const CallWatch&) = delete;
  CallWatch& operator=(const CallWatch&) = delete;

 private:
  std::size_t depth_;
};

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_CAPTURE_CALLS_H_
