// SPDX-License-Identifier: Apache-2.0
//
// Decoding with an epilogue: from its stages to what kernels want.

#include "group/cuda/epilogue.h"

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
  const auto serves = [&](Plan plan) {
    return (bit_of(task.packed_rows.lookup) & lookups_of(plan, TableUse::kRestore)) != 0 &&
           (bit_of(task.rows.lookup) & lookups_of(plan, TableUse::kScale)) != 0 &&
           (bit_of(task.columns.lookup) & lookups_of(plan, TableUse::kWeigh)) != 0;
  };
  if (serves(Plan::kNoTables)) return Plan::kNoTables;
  const bool linear =
      !task.raises && task.product == nullptr &&
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

}  // namespace

Status unpack_group(const GroupFormat& format, const Epilogue& epilogue, const void* payload,
                    void* destination, void* stream) {
  if (format.count == 0) return {};
  EpilogueTask task{};
  task.packet = group_task(format, payload, destination, epilogue.result_type);
  task.packet.destination = destination;
  const int vector = 16 / static_cast<int>(size_of(epilogue.result_type));
  task.packed_rows = table_of(format, epilogue.packed_rows, vector, {});
  task.rows = table_of(format, epilogue.rows, vector, task.packed_rows);
  task.columns = table_of(format, core::columns_as_rows(epilogue.columns), vector, task.rows);
  for (const Table* table : {&task.columns, &task.rows, &task.packed_rows})
    if (table->lookup == Lookup::kHanded) task.runs = *table;
  task.activation = epilogue.activation;
  task.product = epilogue.product;
  task.product_type = epilogue.product_type;
  task.product_aligned =
      group_task(format, payload, epilogue.product, epilogue.product_type).aligned;
  task.mask = static_cast<const std::uint8_t*>(epilogue.mask.data);
  task.mask_in_bytes = format.columns % vector == 0;
  task.mask_factor = epilogue.mask_factor;
  task.result_type = epilogue.result_type;
  task.raises = core::raises(format);
  task.magic = kMagic;

  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  return format.layout == Layout::kStrided
             ? launch_strided_epilogue(plan_for(format, task), task, cuda_stream)
             : launch_flat_epilogue(plan_for(format, task), task, cuda_stream);
}

}  // namespace backfold::cuda
