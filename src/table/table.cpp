// SPDX-License-Identifier: Apache-2.0
//
// The table codec's door: checks, sizes, the choice of a backend, and the tables that come with it.

#include "backfold/table.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/blocks.h"
#include "base/checks.h"
#include "base/dispatch.h"
#include "table/cuda/table.h"
#include "table/derivative_tables.h"
#include "table/reference.h"
#include "table/simd/table.h"

namespace backfold {
namespace {

using core::TableCode;
using core::TablePlanes;

TableCode code_of(const TableFormat& format) {
  TableCode table{};
  table.bits = format.bits;
  for (int i = 0; i < (1 << format.bits) - 1; ++i)
    table.bounds[i] = format.bounds[static_cast<std::size_t>(i)];
  core::with_element(format.type, [&]<typename T>() {
    for (int i = 0; i < 1 << format.bits; ++i) {
      const float value = format.values[static_cast<std::size_t>(i)];
      const T element = std::isnan(value) ? core::nan_element<T>() : core::from_float<T>(value);
      std::memcpy(&table.values[i], &element, sizeof(T));
    }
  });
  return table;
}

cpu::TableKernels kernels_for(const Execution& execution) {
  if (const auto kernels = core::choose_kernels(execution, cpu::table_kernels)) return *kernels;
  return {0, core::reference_pack_table, core::reference_unpack_table};
}

}  // namespace

Status validate(const TableFormat& format) {
  const auto error = StatusCode::kInvalidArgument;
  BACKFOLD_RETURN_IF_ERROR(core::check_float_type(format.type));
  if (std::ranges::count(core::kTableWidths, format.bits) == 0)
    return Status::error(error, "bits must be between 1 and 4, got %d", format.bits);
  BACKFOLD_RETURN_IF_ERROR(core::check_count(format.count));
  for (int i = 0; i < (1 << format.bits) - 1; ++i) {
    const float bound = format.bounds[static_cast<std::size_t>(i)];
    if (!std::isfinite(bound))
      return Status::error(error, "bounds must be finite, got bounds[%d] = %g", i, bound);
    if (i == 0) continue;
    const float before = format.bounds[static_cast<std::size_t>(i - 1)];
    if (!(before < bound))
      return Status::error(error, "bounds must rise, got bounds[%d] = %g and bounds[%d] = %g",
                           i - 1, before, i, bound);
  }
  return {};
}

std::size_t packed_bytes(const TableFormat& format) {
  return validate(format).ok() ? TablePlanes(format.bits, format.count).bytes : 0;
}

Status pack(const TableFormat& format, const void* source, Payload payload,
            const Execution& execution) {
  BACKFOLD_RETURN_IF_ERROR(validate(format));
  const TablePlanes planes(format.bits, format.count);
  const std::size_t size = size_of(format.type);
  BACKFOLD_RETURN_IF_ERROR(
      core::check_call(execution, "source", source, format.count, size, payload, planes.bytes));
  const TableCode table = code_of(format);

  if (core::choose_cuda(execution))
    return cuda::pack_table(table, format.type, source, format.count, payload.data,
                            execution.stream);
  const cpu::TableKernels kernels = kernels_for(execution);
  if (format.count == 0) return {};
  std::uint8_t* const low = static_cast<std::uint8_t*>(payload.data);
  std::uint8_t* const high = low + planes.high_at;
  core::split_elements(format.count, execution, [&](std::int64_t first, std::int64_t count) {
    kernels.pack(table, format.type,
                 static_cast<const char*>(source) + static_cast<std::size_t>(first) * size, count,
                 low + first / 8 * planes.low, high + first / 8 * planes.high);
  });
  const auto clear_after = [&](std::uint8_t* plane, int width, std::size_t bytes) {
    const auto used = static_cast<std::size_t>((format.count * width + 7) / 8);
    std::memset(plane + used, 0, bytes - used);
  };
  clear_after(low, planes.low, planes.high_at);
  if (planes.high != 0) clear_after(high, planes.high, planes.bytes - planes.high_at);
  return {};
}

Status unpack(const TableFormat& format, ConstPayload payload, void* destination,
              const Execution& execution) {
  BACKFOLD_RETURN_IF_ERROR(validate(format));
  const TablePlanes planes(format.bits, format.count);
  const std::size_t size = size_of(format.type);
  BACKFOLD_RETURN_IF_ERROR(core::check_call(execution, "destination", destination, format.count,
                                            size, payload, planes.bytes));
  const TableCode table = code_of(format);

  if (core::choose_cuda(execution))
    return cuda::unpack_table(table, format.type, payload.data, format.count, destination,
                              execution.stream);
  const cpu::TableKernels kernels = kernels_for(execution);
  if (format.count == 0) return {};
  const std::uint8_t* const low = static_cast<const std::uint8_t*>(payload.data);
  const std::uint8_t* const high = low + planes.high_at;
  core::split_elements(format.count, execution, [&](std::int64_t first, std::int64_t count) {
    kernels.unpack(table, format.type, low + first / 8 * planes.low, high + first / 8 * planes.high,
                   count, static_cast<char*>(destination) + static_cast<std::size_t>(first) * size);
  });
  return {};
}

Status derivative_table(Activation activation, int bits, ElementType type, std::int64_t count,
                        TableFormat* table) {
  const auto error = StatusCode::kInvalidArgument;
  if (table == nullptr) return Status::error(error, "table must not be null");
  if (activation < Activation::kGelu || activation > Activation::kSilu)
    return Status::error(error, "activation must be gelu, gelu_tanh or silu, got %d",
                         static_cast<int>(activation));
  for (const core::DerivativeTable& row : core::kDerivativeTables) {
    if (row.activation != activation || row.bits != bits) continue;
    const TableFormat found = {type, bits, row.bounds, row.values, count};
    BACKFOLD_RETURN_IF_ERROR(validate(found));
    *table = found;
    return {};
  }
  return Status::error(error, "bits must be 2, 3 or 4 for a derivative, got %d", bits);
}

}  // namespace backfold
