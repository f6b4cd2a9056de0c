// SPDX-License-Identifier: Apache-2.0
//
// What backward really reads of each saved tensor.
//
// Autograd saves whole tensors, but many backward formulas read less: only the sign, or only the
// sizes. Others are sensitive: they divide by a value, compare it or exponentiate it, and a rounded
// value would give a wrong gradient, not a noisy one. The table in exact_ops_*.cpp lists them, one
// row per operator and slot. Slots of torch's operators without a row are read as values that may
// carry unbiased noise; functions of other libraries without a row stay exact.

#ifndef BACKFOLD_TORCH_READS_EXACT_OPS_H_
#define BACKFOLD_TORCH_READS_EXACT_OPS_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <string_view>

#include "backfold/predicate.h"

namespace backfold::torch_layer {

enum class Reads : std::uint8_t {
  kValues,     // values, where unbiased noise is only noise
  kFinely,     // values, where noise is amplified: at least `bits` bits
  kExactly,    // values that it divides by, compares or exponentiates: never lossy
  kStart,      // values that a checkpoint runs again from: exact until a probe has measured it
  kPredicate,  // the answer of one comparison per element
  kGeometry,   // sizes, strides, type and device
  kIndices,    // integers within a bound that the operator guarantees
};

// One call of an operator, as the dispatcher saw it.
class Call {
 public:
  Call(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments)
      : schema_(schema), arguments_(arguments) {}

  // The argument of that name; None if there is none.
  const c10::IValue& operator[](std::string_view name) const;

 private:
  const c10::FunctionSchema& schema_;
  c10::ArrayRef<c10::IValue> arguments_;
};

// Integers from low to high, inclusive, or the sentinel, which lies outside of that range.
struct Bound {
  std::int64_t low = 0, high = 0;
  bool has_sentinel = false;
  std::int64_t sentinel = 0;
};

// One row. `op` is the operator without overload ("aten::relu"; "aten::relu_" has rows of its own).
// `slot` is the name of the saved argument, "result" for any tensor that the operator made and
// saved, "result.1" for the second of those in the order of saving, "*" for every slot without a
// row of its own. Entries of a list of tensors go by the list's name. An autograd.Function is known
// by its class; its arguments have no names, and "saved.1" is the second tensor that it saves.
struct Rule {
  std::string_view op;
  std::string_view slot;
  Reads reads = Reads::kValues;
  std::string_view reason;  // a clause shown to users in a report: "backward divides by it"
  // The backward nodes that may read a predicate or geometry, by Node::name(), separated by spaces:
  // "ReluBackward0". Indices come back exactly, for any reader.
  std::string_view nodes = {};
  int bits = 0;  // kFinely: the fewest allowed
  // kPredicate: fills comparison, low, high, nan, if_true and if_false such that the backward
  // kernel treats the decoded tensor exactly like the source. False if that is not possible for
  // this call; the tensor then stays exact.
  bool (*predicate)(const Call& call, c10::ScalarType type, PredicateFormat* format) = nullptr;
  // kIndices: the bound that this call guarantees; false if there is none.
  bool (*bound)(const Call& call, Bound* bound) = nullptr;
  // kPredicate: it is enough that decoded > 0 exactly where source > 0, so a zero-exact packet made
  // for another reader serves this one, too.
  bool sign_of_nonnegative = false;
  // If given, the row applies only to calls and saved tensors for which this returns true.
  bool (*when)(const Call& call, const at::Tensor& saved) = nullptr;
};

// Where no call announces that torch.utils.checkpoint saves its inputs, it goes by this name.
inline constexpr std::string_view kCheckpoint = "torch.utils.checkpoint";

// The table.
c10::ArrayRef<Rule> rules();

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_READS_EXACT_OPS_H_
