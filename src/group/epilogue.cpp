// SPDX-License-Identifier: Apache-2.0
//
// Decoding with an epilogue: checks, the choice of a backend, and the scalar loop that defines the
// stages.

#include "group/epilogue.h"

#include <cinttypes>

#include "backfold/predicate.h"
#include "base/checks.h"
#include "base/dispatch.h"
#include "base/threads.h"
#include "group/cuda/epilogue.h"
#include "group/geometry.h"
#include "group/reference.h"
#include "group/simd/epilogue.h"

namespace backfold {
namespace {

using core::GroupGeometry;
using core::GroupSpan;

Status check_type(const char* argument, ElementType type) {
  if (type == ElementType::kF32 || type == ElementType::kF16 || type == ElementType::kBF16)
    return {};
  return Status::error(StatusCode::kInvalidArgument, "%s must be fp32, fp16 or bf16, got %s",
                       argument, name_of(type));
}

Status check_format(const GroupFormat& format) {
  BACKFOLD_RETURN_IF_ERROR(validate(format));
  BACKFOLD_RETURN_IF_ERROR(check_type("type of a packet with an epilogue", format.type));
  if (format.layout == Layout::kRotated || format.group != 128)
    return Status::error(StatusCode::kInvalidArgument,
                         "groups must be flat or strided, of 128, for an epilogue");
  return {};
}

// A table of `entries` values, each for `run` elements. `data` is null for one that is not there.
Status check_table(const char* name, const char* entries_name, const void* data, std::int64_t run,
                   std::int64_t entries) {
  if (data == nullptr || (run >= 1 && entries >= 1)) return {};
  return Status::error(StatusCode::kInvalidArgument,
                       "run and %s of %s must be at least 1, got %" PRId64 " and %" PRId64,
                       entries_name, name, run, entries);
}

Status check_mask(const Epilogue& epilogue, std::int64_t count) {
  if (epilogue.mask.data == nullptr) return {};
  const std::size_t needed = packed_bytes(PredicateFormat{.count = count});
  if (epilogue.mask.bytes < needed)
    return Status::error(StatusCode::kShortPayload, "mask must hold %zu bytes, got %zu", needed,
                         epilogue.mask.bytes);
  if (reinterpret_cast<std::uintptr_t>(epilogue.mask.data) % kPayloadAlignment != 0)
    return Status::error(StatusCode::kInvalidArgument, "mask must be %zu-byte aligned, got %p",
                         kPayloadAlignment, epilogue.mask.data);
  return {};
}

// The value of element number `element` after every stage but the last.
float finished(const GroupFormat& format, const Epilogue& epilogue, float x, std::int64_t element) {
  if (core::raises(format)) x = core::raised(x);
  if (const RowAffine& rows = epilogue.packed_rows; rows.scale != nullptr) {
    const std::int64_t row = core::row_place(rows, element).row;
    x = core::restored(x, core::shift_of(rows, row), 1.0f / rows.scale[row]);
  }
  if (const RowAffine& rows = epilogue.rows; rows.scale != nullptr) {
    const std::int64_t row = core::row_place(rows, element).row;
    x = core::scaled(x, core::shift_of(rows, row), rows.scale[row]);
  }
  if (const RowAffine columns = core::columns_as_rows(epilogue.columns); columns.scale != nullptr) {
    const std::int64_t column = core::row_place(columns, element).row;
    x = core::restored(x, core::shift_of(columns, column), columns.scale[column]);
  }
  core::with_activation(epilogue.activation, [&](auto function) { x = function(x); });
  if (epilogue.product != nullptr) {
    core::with_element(epilogue.product_type, [&]<typename T>() {
      x = x * core::to_float(static_cast<const T*>(epilogue.product)[element]);
    });
  }
  if (epilogue.mask.data != nullptr) {
    const auto* bytes = static_cast<const std::uint8_t*>(epilogue.mask.data);
    x = (bytes[element / 8] >> element % 8 & 1) != 0 ? x * epilogue.mask_factor : 0.0f;
  }
  return core::one_nan(x);
}

void reference_unpack(const GroupFormat& format, const Epilogue& epilogue, const void* payload,
                      void* destination, std::int64_t begin, std::int64_t end) {
  const GroupGeometry geometry(format);
  const auto* headers = static_cast<const std::uint32_t*>(payload);
  const auto* codes = static_cast<const std::uint8_t*>(payload) + geometry.header_bytes;
  for (std::int64_t group = begin; group < end; ++group) {
    const GroupSpan span = core::span_of(format, group);
    float values[128];
    core::reference_unpack_group(core::format_of_values(format), headers[group],
                                 codes + static_cast<std::size_t>(group) * geometry.code_bytes,
                                 values, 1, span.count);
    core::with_element(epilogue.result_type, [&]<typename T>() {
      for (int i = 0; i < span.count; ++i) {
        const std::int64_t element = span.offset + i * span.stride;
        static_cast<T*>(destination)[element] =
            core::from_float<T>(finished(format, epilogue, values[i], element));
      }
    });
  }
}

}  // namespace

Status validate(const GroupFormat& format, const Epilogue& epilogue) {
  BACKFOLD_RETURN_IF_ERROR(check_format(format));
  const RowAffine &packed = epilogue.packed_rows, &rows = epilogue.rows;
  const ColumnAffine& columns = epilogue.columns;
  if (packed.scale != nullptr) BACKFOLD_RETURN_IF_ERROR(validate(format, packed));
  BACKFOLD_RETURN_IF_ERROR(check_table("rows", "rows", rows.scale, rows.run, rows.rows));
  BACKFOLD_RETURN_IF_ERROR(
      check_table("columns", "columns", columns.weight, columns.run, columns.columns));
  if (epilogue.activation > Activation::kRelu)
    return Status::error(
        StatusCode::kInvalidArgument,
        "activation must be none, gelu, gelu_tanh, silu, sigmoid, tanh or relu, got %d",
        static_cast<int>(epilogue.activation));
  if (epilogue.product != nullptr) {
    BACKFOLD_RETURN_IF_ERROR(check_type("product_type", epilogue.product_type));
    BACKFOLD_RETURN_IF_ERROR(core::check_buffer("product", epilogue.product, format.count,
                                                size_of(epilogue.product_type)));
  }
  BACKFOLD_RETURN_IF_ERROR(check_type("result_type", epilogue.result_type));
  return check_mask(epilogue, format.count);
}

Status unpack(const GroupFormat& format, const Epilogue& epilogue, ConstPayload payload,
              void* destination, const Execution& execution) {
  BACKFOLD_RETURN_IF_ERROR(validate(format, epilogue));
  const GroupGeometry geometry(format);
  BACKFOLD_RETURN_IF_ERROR(core::check_call(execution, "destination", destination, format.count,
                                            size_of(epilogue.result_type), payload,
                                            geometry.bytes()));
  if (core::choose_cuda(execution))
    return cuda::unpack_group(format, epilogue, payload.data, destination, execution.stream);
  const auto kernels = core::choose_kernels(execution, cpu::epilogue_kernels);
  const auto unpack_range = kernels ? kernels->unpack : reference_unpack;
  core::split_over_threads(geometry.groups, core::kGroupGrain, execution.threads,
                           [&](std::int64_t begin, std::int64_t end) {
                             unpack_range(format, epilogue, payload.data, destination, begin, end);
                           });
  return {};
}

}  // namespace backfold
