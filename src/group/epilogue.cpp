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

Status check_mask(ConstPayload mask, std::int64_t count) {
  const std::size_t needed = packed_bytes(PredicateFormat{.count = count});
  if (mask.data == nullptr || mask.bytes < needed)
    return Status::error(StatusCode::kShortPayload, "mask must hold %zu bytes, got %zu", needed,
                         mask.data == nullptr ? 0 : mask.bytes);
  if (reinterpret_cast<std::uintptr_t>(mask.data) % kPayloadAlignment != 0)
    return Status::error(StatusCode::kInvalidArgument, "mask must be %zu-byte aligned, got %p",
                         kPayloadAlignment, mask.data);
  return {};
}

Status check_activation(Activation activation) {
  if (activation <= Activation::kRelu) return {};
  return Status::error(
      StatusCode::kInvalidArgument,
      "activation must be none, gelu, gelu_tanh, silu, sigmoid, tanh or relu, got %d",
      static_cast<int>(activation));
}

Status check_operand(const Step& step) {
  if (step.from > Step::From::kSlot)
    return Status::error(StatusCode::kInvalidArgument,
                         "operand of a step must be a number, a tensor or a slot, got %d",
                         static_cast<int>(step.from));
  if (step.from != Step::From::kTensor) return {};
  BACKFOLD_RETURN_IF_ERROR(check_type("type of a step's tensor", step.type));
  BACKFOLD_RETURN_IF_ERROR(check_table("a step", "entries", &step, step.run, step.entries));
  return core::check_buffer("tensor of a step", step.tensor, step.entries, size_of(step.type));
}

Status check_steps(std::span<const Step> steps, std::int64_t count) {
  if (steps.size() > kMaxSteps)
    return Status::error(StatusCode::kInvalidArgument, "steps must be at most %d, got %zu",
                         kMaxSteps, steps.size());
  bool filled[kSlots] = {};
  for (const Step& step : steps) {
    const bool has_operand = step.kind == Step::Kind::kAdd || step.kind == Step::Kind::kMultiply;
    const bool reads =
        step.kind == Step::Kind::kTake || (has_operand && step.from == Step::From::kSlot);
    if ((reads || step.kind == Step::Kind::kKeep) && (step.slot < 0 || step.slot >= kSlots))
      return Status::error(StatusCode::kInvalidArgument, "slot must be between 0 and %d, got %d",
                           kSlots - 1, step.slot);
    if (reads && !filled[step.slot])
      return Status::error(StatusCode::kInvalidArgument, "slot %d is read before it is filled",
                           step.slot);
    switch (step.kind) {
      case Step::Kind::kAdd:
      case Step::Kind::kMultiply:
        BACKFOLD_RETURN_IF_ERROR(check_operand(step));
        break;
      case Step::Kind::kActivate:
        BACKFOLD_RETURN_IF_ERROR(check_activation(step.activation));
        break;
      case Step::Kind::kMask:
        BACKFOLD_RETURN_IF_ERROR(check_mask(step.mask, count));
        break;
      case Step::Kind::kKeep:
        filled[step.slot] = true;
        break;
      case Step::Kind::kSquare:
      case Step::Kind::kCube:
      case Step::Kind::kTake:
        break;
      default:
        return Status::error(StatusCode::kInvalidArgument, "kind of a step must be 0 to 7, got %d",
                             static_cast<int>(step.kind));
    }
  }
  return {};
}

// What a step takes beside x.
float operand_of(const Step& step, const float* slots, std::int64_t element) {
  if (step.from == Step::From::kNumber) return step.factor;
  if (step.from == Step::From::kSlot) return step.factor * slots[step.slot];
  float value = 0.0f;
  core::with_element(step.type, [&]<typename T>() {
    value = core::to_float(static_cast<const T*>(step.tensor)[element / step.run % step.entries]);
  });
  return step.factor * value;
}

float stepped(const Step& step, float* slots, float x, std::int64_t element) {
  switch (step.kind) {
    case Step::Kind::kAdd:
      return x + operand_of(step, slots, element);
    case Step::Kind::kMultiply:
      return x * operand_of(step, slots, element);
    case Step::Kind::kSquare:
      return x * x;
    case Step::Kind::kCube:
      return x * x * x;
    case Step::Kind::kActivate:
      core::with_activation(step.activation, [&](auto function) { x = function(x); });
      return x;
    case Step::Kind::kMask: {
      const auto* bytes = static_cast<const std::uint8_t*>(step.mask.data);
      return (bytes[element / 8] >> element % 8 & 1) != 0 ? x * step.factor : 0.0f;
    }
    case Step::Kind::kKeep:
      return slots[step.slot] = x;
    case Step::Kind::kTake:
      return slots[step.slot];
  }
  return x;
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
  float slots[kSlots] = {};
  for (const Step& step : epilogue.steps) x = stepped(step, slots, x, element);
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
  BACKFOLD_RETURN_IF_ERROR(check_type("result_type", epilogue.result_type));
  return check_steps(epilogue.steps, format.count);
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
  core::split_over_threads(geometry.groups, core::kGroupGrain, execution,
                           [&](std::int64_t begin, std::int64_t end) {
                             unpack_range(format, epilogue, payload.data, destination, begin, end);
                           });
  return {};
}

}  // namespace backfold
