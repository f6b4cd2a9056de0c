// SPDX-License-Identifier: Apache-2.0
//
// Decoding with an epilogue: from its stages to what kernels want.

#include "group/cuda/epilogue.h"

#include <algorithm>

#include "group/cuda/epilogue.cuh"

namespace backfold::cuda {
namespace {

// Elements below it have short divisions.
constexpr std::int64_t kTableLimit = (std::int64_t{1} << 31) - kTableMargin;

Lookup lookup_for(const GroupFormat& format, const RowAffine& rows, const Table& table,
                  int vector) {
  if (format.layout == Layout::kStrided) {
    if (rows.run % format.columns == 0) return Lookup::kPerRow;
    if (table.period != 0 && format.columns % table.period == 0) return Lookup::kPerColumn;
    return Lookup::kEach;
  }
  if (table.rows.wide) return Lookup::kEach;
  if (rows.run >= shortest_handed_run(vector)) return Lookup::kHanded;
  if (rows.run == 1 && rows.rows % 4 == 0 && is_aligned(rows.scale, 16) &&
      is_aligned(rows.shift, 16))
    return Lookup::kQuads;
  return rows.run >= vector ? Lookup::kTwo : Lookup::kEach;
}

// `before` is the table of the stage before.
Table table_of(const GroupFormat& format, const RowAffine& rows, int vector, const Table& before) {
  Table table{};
  if (rows.scale == nullptr) return table;
  if (rows.run < kTableLimit / rows.rows) table.period = rows.run * rows.rows;
  table.folds = table.period != 0 && format.count >= kTableLimit;
  table.rows = row_task(rows, (table.folds ? table.period : format.count) + kTableMargin);
  table.lookup = lookup_for(format, rows, table, vector);
  table.splits = rows.run % vector != 0;
  table.as_before =
      before.lookup == table.lookup && before.rows.run == rows.run && before.rows.rows == rows.rows;
  table.shifts = rows.shift != nullptr;
  return table;
}

// The narrowest plan that serves a task.
Plan plan_for(const GroupFormat& format, const EpilogueTask& task) {
  if (task.step_count > 0) return Plan::kSteps;
  const auto serves = [&](Plan plan) {
    return (bit_of(task.packed_rows.lookup) & lookups_of(plan, TableUse::kRestore)) != 0 &&
           (bit_of(task.rows.lookup) & lookups_of(plan, TableUse::kScale)) != 0 &&
           (bit_of(task.columns.lookup) & lookups_of(plan, TableUse::kWeigh)) != 0;
  };
  if (serves(Plan::kNoTables)) return Plan::kNoTables;
  const bool linear =
      !task.raises && task.number == 1.0f &&
      (task.activation == Activation::kNone || task.activation == Activation::kRelu);
  if (!linear || format.count >= kTableLimit) return Plan::kAny;
  for (const Table* table : {&task.rows, &task.columns})
    if (table->lookup == Lookup::kHanded &&
        (table->rows.run != task.runs.rows.run || table->rows.rows != task.runs.rows.rows))
      return Plan::kAny;
  for (const Plan plan : {Plan::kRuns, Plan::kRunsAndColumns, Plan::kStaged})
    if (serves(plan)) return plan;
  return Plan::kAny;
}

bool is_whole(const Step& step, std::int64_t count) {
  return step.run == 1 && step.entries == count;
}

// Whether the steps are an activation or a formula, a product with a number, a sum or product with
// a tensor, a mask; then they are entered.
bool enter_usual(const GroupFormat& format, std::span<const Step> steps, EpilogueTask& task) {
  const auto only_x = [](const Step& step) {
    return step.kind != Step::Kind::kMask && step.from != Step::From::kTensor;
  };
  const auto end = std::find_if_not(steps.begin(), steps.end(), only_x);
  const auto alone = steps.first(static_cast<std::size_t>(end - steps.begin()));
  std::size_t next = 0;
  const auto take = [&](auto is_it) -> const Step* {
    return next < steps.size() && is_it(steps[next]) ? &steps[next++] : nullptr;
  };
  const Step *activation = nullptr, *number = nullptr;
  const auto form = alone.size() > 1 ? core::closed_form(alone) : std::nullopt;
  if (form) {
    next = alone.size();
  } else {
    activation = take([](const Step& step) { return step.kind == Step::Kind::kActivate; });
    number = take([&](const Step& step) {
      return step.kind == Step::Kind::kMultiply && step.from == Step::From::kNumber;
    });
  }
  const Step* tensor = take([&](const Step& step) {
    return (step.kind == Step::Kind::kAdd || step.kind == Step::Kind::kMultiply) &&
           step.from == Step::From::kTensor && step.factor == 1.0f && is_whole(step, format.count);
  });
  const Step* mask = take([](const Step& step) { return step.kind == Step::Kind::kMask; });
  if (next < steps.size()) return false;
  if (activation != nullptr) task.activation = activation->activation;
  if (form) {
    task.has_form = true;
    task.form = *form;
    task.activation = form->activation;
  }
  if (number != nullptr) task.number = number->factor;
  if (tensor != nullptr) {
    task.tensor = tensor->tensor;
    task.tensor_type = tensor->type;
    task.tensor_aligned = group_task(format, nullptr, tensor->tensor, tensor->type).aligned;
    task.adds = tensor->kind == Step::Kind::kAdd;
  }
  if (mask != nullptr) {
    task.mask = static_cast<const std::uint8_t*>(mask->mask.data);
    task.mask_factor = mask->factor;
  }
  return true;
}

StepTask step_task(const GroupFormat& format, const Step& step, int vector) {
  StepTask task{};
  task.kind = step.kind;
  task.from = step.from;
  task.activation = step.activation;
  task.second = step.slot == 1;
  task.factor = step.factor;
  task.data = step.kind == Step::Kind::kMask ? step.mask.data : step.tensor;
  if (step.from != Step::From::kTensor || step.tensor == nullptr) return task;
  task.type = step.type;
  task.run = step.run;
  task.entries = step.entries;
  // Neighbours that a vector may have: vectors begin at multiples of their length, in strided
  // tensors from the beginning of a row on.
  const bool strided = format.layout == Layout::kStrided;
  const std::int64_t together = strided ? format.columns : vector;
  task.spread = is_whole(step, format.count) ? Spread::kWhole
                : step.run % together == 0   ? Spread::kRows
                                             : Spread::kEach;
  task.aligned = step.run == 1 && together % vector == 0 && step.entries % vector == 0 &&
                 is_aligned(step.tensor, 16);
  task.wide = format.count >= kTableLimit || step.run >= kTableLimit;
  if (!task.wide) {
    task.by_run = Divider(step.run);
    task.by_entries = Divider(step.entries);
  }
  return task;
}

}  // namespace

Status unpack_group(const GroupFormat& format, const Epilogue& epilogue, const void* payload,
                    void* destination, void* stream) {
  if (format.count == 0) return {};
  EpilogueTask task{};
  task.number = 1.0f;
  task.packet = group_task(format, payload, destination, epilogue.result_type);
  task.packet.destination = destination;
  const int vector = 16 / static_cast<int>(size_of(epilogue.result_type));
  task.packed_rows = table_of(format, epilogue.packed_rows, vector, {});
  task.rows = table_of(format, epilogue.rows, vector, task.packed_rows);
  task.columns = table_of(format, core::columns_as_rows(epilogue.columns), vector, task.rows);
  for (const Table* table : {&task.columns, &task.rows, &task.packed_rows})
    if (table->lookup == Lookup::kHanded) task.runs = *table;
  task.mask_in_bytes = format.columns % vector == 0;
  if (!enter_usual(format, epilogue.steps, task))
    for (const Step& step : epilogue.steps)
      task.steps[task.step_count++] = step_task(format, step, vector);
  task.result_type = epilogue.result_type;
  task.raises = core::raises(format);
  task.magic = kMagic;

  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  return format.layout == Layout::kStrided
             ? launch_strided_epilogue(plan_for(format, task), task, cuda_stream)
             : launch_flat_epilogue(plan_for(format, task), task, cuda_stream);
}

}  // namespace backfold::cuda
