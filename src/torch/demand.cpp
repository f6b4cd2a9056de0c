// SPDX-License-Identifier: Apache-2.0

#include "torch/demand.h"

namespace backfold::torch_layer {
namespace {

// The backward of a Python function or of another library's operator may do anything with what it
// saved. 8 bits keep what it exponentiates or subtracts within a fraction of a percent of a group's
// range.
constexpr int kOpaqueBits = 8;

int strictness(const Rule* rule) {
  switch (rule ? rule->reads : Reads::kValues) {
    case Reads::kGeometry:
      return 0;
    case Reads::kPredicate:
    case Reads::kIndices:
      return 1;
    case Reads::kValues:
      return 2;
    case Reads::kFinely:
      return 3;
    case Reads::kExactly:
      return 4;
  }
  return 4;
}

// The first row that holds for this call.
const Rule* first_of(const std::vector<const Rule*>& rows, const Call& call,
                     const at::Tensor& tensor) {
  for (const Rule* rule : rows)
    if (!rule->when || rule->when(call, tensor)) return rule;
  return nullptr;
}

// Likewise among the rows for results: "result" is for each of them, "result.1" for the second.
const Rule* rule_of_result(const std::vector<const Rule*>& rows, int ordinal, const Call& call,
                           const at::Tensor& tensor) {
  for (const Rule* rule : rows) {
    const bool named = rule->slot.starts_with("result.");
    if (named && rule->slot.back() - '0' != ordinal) continue;
    if (!rule->when || rule->when(call, tensor)) return rule;
  }
  return nullptr;
}

}  // namespace

Demand demand_of(RunningCall& call, const at::Tensor& tensor) {
  Demand demand;
  const Operator& op = *call.op;
  static const c10::FunctionSchema no_schema("", "", {}, {});
  const Call arguments(op.schema ? *op.schema : no_schema, call.arguments);
  demand.slot = -1;
  for (const auto& [argument, position] : call.tensors) {
    if (argument != tensor.unsafeGetTensorImpl()) continue;
    const auto index = static_cast<std::size_t>(position);
    const Rule* rule = index < op.argument_rules.size()
                           ? first_of(op.argument_rules[index], arguments, tensor)
                           : nullptr;
    if (demand.slot < 0 || strictness(rule) > strictness(demand.rule)) demand.rule = rule;
    if (demand.slot < 0) demand.slot = position;
  }
  if (demand.slot < 0) {
    const int ordinal = call.results++;
    demand.rule = rule_of_result(op.result_rules, ordinal, arguments, tensor);
    demand.slot = static_cast<int>(op.slots.size()) + ordinal;
  }
  if (op.norm && demand.slot == op.norm_slot) demand.norm = norm_call(*op.norm, arguments);
  if (op.opaque) {
    demand.reads = Reads::kFinely;
    demand.bits = kOpaqueBits;
    demand.reason = "what its backward does is not known";
  }
  if (!demand.rule) return demand;

  const Rule& rule = *demand.rule;
  demand.reads = rule.reads;
  demand.bits = rule.bits;
  demand.reason = rule.reason.data();
  if (rule.reads == Reads::kPredicate &&
      !rule.predicate(arguments, tensor.scalar_type(), &demand.predicate))
    demand.reads = Reads::kExactly;
  if (rule.reads == Reads::kIndices && !rule.bound(arguments, &demand.bound))
    demand.reads = Reads::kExactly;
  return demand;
}

}  // namespace backfold::torch_layer
