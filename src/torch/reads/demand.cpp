// SPDX-License-Identifier: Apache-2.0

#include "torch/reads/demand.h"

namespace backfold::torch_layer {
namespace {

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
    case Reads::kStart:
      return 4;
  }
  return 4;
}

// The first row that applies to this call.
const Rule* first_of(const std::vector<const Rule*>& rows, const Call& call,
                     const at::Tensor& tensor) {
  for (const Rule* rule : rows)
    if (!rule->when || rule->when(call, tensor)) return rule;
  return nullptr;
}

// The same among rows by order: "result" applies to each result, "result.1" to the second.
const Rule* rule_by_order(const std::vector<const Rule*>& rows, int ordinal, const Call& call,
                          const at::Tensor& tensor) {
  for (const Rule* rule : rows) {
    const bool numbered = rule->slot.find('.') != std::string_view::npos;
    if (numbered && rule->slot.back() - '0' != ordinal) continue;
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
  const int order = call.saves++;
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
    demand.rule = rule_by_order(op.result_rules, ordinal, arguments, tensor);
    demand.slot = static_cast<int>(op.slots.size()) + ordinal;
  }
  if (op.makes_shares && !call.arguments.empty() &&
      demand.slot >= static_cast<int>(op.slots.size()))
    demand.shares_along = arguments["dim"].toInt();
  if (op.norm && demand.slot == op.norm_slot) demand.norm = norm_call(*op.norm, arguments);
  if (!op.schema) demand.rule = rule_by_order(op.saved_rules, order, arguments, tensor);
  if (op.opaque && !demand.rule) {
    demand.reads = Reads::kExactly;
    demand.reason = "an unknown function, kept exact; codec= opens it";
  }
  demand.openable = op.opaque && (!demand.rule || demand.rule->reads == Reads::kExactly ||
                                  demand.rule->reads == Reads::kStart);
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
