// SPDX-License-Identifier: Apache-2.0
//
// The group quantizer's door: checks, sizes, and the choice of a backend.

#include "backfold/group.h"

#include <algorithm>
#include <cinttypes>

#include "base/checks.h"
#include "base/convert.h"
#include "base/dispatch.h"
#include "base/threads.h"
#include "group/cuda/group.h"
#include "group/geometry.h"
#include "group/reference.h"
#include "group/simd/group.h"

namespace backfold {
namespace {

using core::GroupGeometry;
using core::GroupSpan;

Status check_values(const GroupFormat& format) {
  const auto error = StatusCode::kInvalidArgument;
  BACKFOLD_RETURN_IF_ERROR(core::check_float_type(format.type));
  if (!is_code_width(format.bits))
    return Status::error(error, "bits must be one of %s, got %d", list_code_widths(), format.bits);
  if (format.layout > Layout::kRotated)
    return Status::error(error, "layout must be flat, strided or rotated, got %d",
                         static_cast<int>(format.layout));
  if (format.group != 128 && format.group != 256)
    return Status::error(error, "group must be 128 or 256, got %d", format.group);
  return core::check_count(format.count);
}

Status check_combination(const GroupFormat& format) {
  const auto error = StatusCode::kInvalidArgument;
  if (format.group == 256 && format.layout != Layout::kFlat)
    return Status::error(error, "group must be 128 unless the layout is flat, got 256");
  if (format.zero_exact && format.bits < 2)
    return Status::error(error, "bits must be at least 2 for zero_exact, got %d", format.bits);
  if (format.zero_exact && format.layout == Layout::kRotated)
    return Status::error(error, "zero_exact must be false for a rotated layout");
  if (format.layout == Layout::kStrided && format.count > 0 &&
      (format.columns < 1 || format.count % format.columns != 0))
    return Status::error(error,
                         "columns must divide count for a strided layout, got %" PRId64
                         " columns and %" PRId64 " elements",
                         format.columns, format.count);
  if (format.bits * format.group + 32 >= static_cast<int>(size_of(format.type)) * 8 * format.group)
    return Status::error(error,
                         "bits must be fewer than the source has, got %d for %s: a packet would "
                         "not be smaller than its source",
                         format.bits, name_of(format.type));
  return {};
}

std::uint32_t* headers_of(void* payload) { return static_cast<std::uint32_t*>(payload); }

// The headers are padded with zeros.
void clear_padding(void* payload, const GroupGeometry& geometry) {
  for (std::size_t i = static_cast<std::size_t>(geometry.groups); i < geometry.header_bytes / 4;
       ++i)
    headers_of(payload)[i] = 0;
}

std::uint8_t* codes_of(void* payload, const GroupGeometry& geometry, std::int64_t group) {
  return static_cast<std::uint8_t*>(payload) + geometry.header_bytes +
         static_cast<std::size_t>(group) * geometry.code_bytes;
}

const char* element_at(const GroupFormat& format, const void* data, std::int64_t index) {
  return static_cast<const char*>(data) + static_cast<std::size_t>(index) * size_of(format.type);
}

// The first negative element, -1 if there is none.
Status find_negative(const GroupFormat& format, const void* source, const Execution& execution,
                     std::int64_t* index) {
  if (execution.backend == Backend::kCuda)
    return cuda::find_negative(format, source, execution.stream, index);
  core::with_element(format.type, [&]<typename T>() {
    const T* elements = static_cast<const T*>(source);
    const T* negative =
        std::find_if(elements, elements + format.count, [](T e) { return core::is_negative(e); });
    *index = negative == elements + format.count ? -1 : negative - elements;
  });
  return {};
}

Status check_contract(const GroupFormat& format, const void* source, const Execution& execution) {
  if (!core::kCheckContracts || !format.zero_exact) return {};
  std::int64_t index = -1;
  BACKFOLD_RETURN_IF_ERROR(find_negative(format, source, execution, &index));
  if (index < 0) return {};
  return Status::error(StatusCode::kContractBroken,
                       "source must not be negative for zero_exact, but element %" PRId64 " is",
                       index);
}

}  // namespace

Status validate(const GroupFormat& format) {
  BACKFOLD_RETURN_IF_ERROR(check_values(format));
  return check_combination(format);
}

std::size_t packed_bytes(const GroupFormat& format) {
  return validate(format).ok() ? GroupGeometry(format).bytes() : 0;
}

Status pack(const GroupFormat& format, const void* source, const Key& key, Payload payload,
            const Execution& execution) {
  BACKFOLD_RETURN_IF_ERROR(validate(format));
  const GroupGeometry geometry(format);
  BACKFOLD_RETURN_IF_ERROR(core::check_call(execution, "source", source, format.count,
                                            size_of(format.type), payload, geometry.bytes()));
  BACKFOLD_RETURN_IF_ERROR(check_contract(format, source, execution));
  const core::MixedKey mixed = core::mixed_for(key, execution);

  if (core::choose_cuda(execution))
    return cuda::pack_group(format, source, mixed, payload.data, execution.stream);
  const auto kernels = core::choose_kernels(execution, cpu::group_packers);
  clear_padding(payload.data, geometry);
  core::split_over_threads(
      geometry.groups, core::kGroupGrain, execution, [&](std::int64_t begin, std::int64_t end) {
        if (kernels) return kernels->pack(format, source, mixed, payload.data, begin, end);
        for (std::int64_t group = begin; group < end; ++group) {
          const GroupSpan span = core::span_of(format, group);
          core::reference_pack_group(format, element_at(format, source, span.offset), span.stride,
                                     span.count, mixed, static_cast<std::uint64_t>(group),
                                     headers_of(payload.data) + group,
                                     codes_of(payload.data, geometry, group));
        }
      });
  return {};
}

Status unpack(const GroupFormat& format, ConstPayload payload, void* destination,
              const Execution& execution) {
  BACKFOLD_RETURN_IF_ERROR(validate(format));
  const GroupGeometry geometry(format);
  BACKFOLD_RETURN_IF_ERROR(core::check_call(execution, "destination", destination, format.count,
                                            size_of(format.type), payload, geometry.bytes()));

  if (core::choose_cuda(execution))
    return cuda::unpack_group(format, payload.data, destination, execution.stream);
  const auto kernels = core::choose_kernels(execution, cpu::group_unpackers);
  void* bytes = const_cast<void*>(payload.data);  // only read below
  core::split_over_threads(
      geometry.groups, core::kGroupGrain, execution, [&](std::int64_t begin, std::int64_t end) {
        if (kernels) return kernels->unpack(format, bytes, destination, begin, end);
        for (std::int64_t group = begin; group < end; ++group) {
          const GroupSpan span = core::span_of(format, group);
          core::reference_unpack_group(
              format, headers_of(bytes)[group], codes_of(bytes, geometry, group),
              const_cast<char*>(element_at(format, destination, span.offset)), span.stride,
              span.count);
        }
      });
  return {};
}

Status validate(const GroupFormat& format, const RowAffine& rows) {
  const auto error = StatusCode::kInvalidArgument;
  BACKFOLD_RETURN_IF_ERROR(validate(format));
  if (format.type == ElementType::kF64)
    return Status::error(error, "type must be fp32, fp16 or bf16 where rows are scaled, got fp64");
  if (format.layout == Layout::kRotated || format.group != 128 || format.zero_exact)
    return Status::error(error,
                         "groups must be flat or strided, of 128, and not zero_exact where rows "
                         "are scaled");
  if (rows.run < 1 || rows.rows < 1)
    return Status::error(error, "run and rows must be at least 1, got %" PRId64 " and %" PRId64,
                         rows.run, rows.rows);
  if (rows.scale == nullptr) return Status::error(error, "scale must not be null");
  return {};
}

Status pack(const GroupFormat& format, const RowAffine& rows, const void* source, const Key& key,
            Payload payload, const Execution& execution) {
  BACKFOLD_RETURN_IF_ERROR(validate(format, rows));
  const GroupGeometry geometry(format);
  BACKFOLD_RETURN_IF_ERROR(core::check_call(execution, "source", source, format.count,
                                            size_of(format.type), payload, geometry.bytes()));
  const core::MixedKey mixed = core::mixed_for(key, execution);
  if (core::choose_cuda(execution))
    return cuda::pack_group(format, source, mixed, payload.data, execution.stream, &rows);
  const auto kernels = core::choose_kernels(execution, cpu::group_packers);
  clear_padding(payload.data, geometry);
  core::split_over_threads(
      geometry.groups, core::kGroupGrain, execution, [&](std::int64_t begin, std::int64_t end) {
        if (kernels)
          return kernels->pack_rows(format, rows, source, mixed, payload.data, begin, end);
        for (std::int64_t group = begin; group < end; ++group) {
          const GroupSpan span = core::span_of(format, group);
          core::reference_pack_group(
              format, rows, element_at(format, source, span.offset), span.offset, span.stride,
              span.count, mixed, static_cast<std::uint64_t>(group),
              headers_of(payload.data) + group, codes_of(payload.data, geometry, group));
        }
      });
  return {};
}

Status unpack(const GroupFormat& format, const RowAffine& rows, ConstPayload payload,
              void* destination, const Execution& execution) {
  BACKFOLD_RETURN_IF_ERROR(validate(format, rows));
  const GroupGeometry geometry(format);
  BACKFOLD_RETURN_IF_ERROR(core::check_call(execution, "destination", destination, format.count,
                                            size_of(format.type), payload, geometry.bytes()));
  if (core::choose_cuda(execution))
    return cuda::unpack_group(format, payload.data, destination, execution.stream, &rows);
  const auto kernels = core::choose_kernels(execution, cpu::group_unpackers);
  void* bytes = const_cast<void*>(payload.data);  // only read below
  core::split_over_threads(
      geometry.groups, core::kGroupGrain, execution, [&](std::int64_t begin, std::int64_t end) {
        if (kernels) return kernels->unpack_rows(format, rows, bytes, destination, begin, end);
        for (std::int64_t group = begin; group < end; ++group) {
          const GroupSpan span = core::span_of(format, group);
          core::reference_unpack_group(
              format, rows, headers_of(bytes)[group], codes_of(bytes, geometry, group),
              const_cast<char*>(element_at(format, destination, span.offset)), span.offset,
              span.stride, span.count);
        }
      });
  return {};
}

Status expected_squared_error(const GroupFormat& format, const void* source, double* error) {
  BACKFOLD_RETURN_IF_ERROR(validate(format));
  BACKFOLD_RETURN_IF_ERROR(
      core::check_buffer("source", source, format.count, size_of(format.type)));
  if (error == nullptr)
    return Status::error(StatusCode::kInvalidArgument, "error must not be null");
  *error = 0.0;
  const GroupGeometry geometry(format);
  for (std::int64_t group = 0; group < geometry.groups; ++group) {
    const GroupSpan span = core::span_of(format, group);
    *error += core::reference_group_error(format, element_at(format, source, span.offset),
                                          span.stride, span.count);
  }
  return {};
}

}  // namespace backfold
