// SPDX-License-Identifier: Apache-2.0
//
// The narrow codec's door: checks, sizes and the choice of a backend.

#include "backfold/narrow.h"

#include <cinttypes>
#include <cstring>
#include <limits>

#include "base/blocks.h"
#include "base/checks.h"
#include "base/dispatch.h"
#include "lossless/cuda/narrow.h"
#include "lossless/narrow_code.h"
#include "lossless/reference.h"
#include "lossless/simd/narrow.h"

namespace backfold {
namespace {

using core::NarrowCode;

// For a format whose low is not above its high. Codes of 64 bits stand for "too many values".
NarrowCode code_of(const NarrowFormat& format) {
  const auto low = static_cast<std::uint64_t>(format.low);
  const std::uint64_t span = static_cast<std::uint64_t>(format.high) - low;
  NarrowCode code = {low, low, 0, span, 8};
  const std::uint64_t room = format.has_sentinel ? 1 : 0;
  for (const int bytes : {4, 2, 1})
    if (span <= (std::uint64_t{1} << 8 * bytes) - 1 - room) code.code_bytes = bytes;
  if (format.has_sentinel) {
    code.sentinel = static_cast<std::uint64_t>(format.sentinel);
    code.sentinel_code = span + 1;
  }
  return code;
}

Status check_holds(ElementType type, const char* argument, std::int64_t value) {
  const int bits = static_cast<int>(8 * size_of(type));
  const std::int64_t most = std::numeric_limits<std::int64_t>::max() >> (64 - bits);
  if (value >= -most - 1 && value <= most) return {};
  return Status::error(StatusCode::kInvalidArgument,
                       "%s must be a value of %s, between %" PRId64 " and %" PRId64
                       ", got %" PRId64,
                       argument, name_of(type), -most - 1, most, value);
}

std::int64_t element_at(ElementType type, const void* source, std::int64_t index) {
  switch (size_of(type)) {
    case 2:
      return static_cast<const std::int16_t*>(source)[index];
    case 4:
      return static_cast<const std::int32_t*>(source)[index];
    default:
      return static_cast<const std::int64_t*>(source)[index];
  }
}

Status broken_bound(const NarrowFormat& format, std::int64_t index, std::int64_t value) {
  if (format.has_sentinel)
    return Status::error(StatusCode::kContractBroken,
                         "source must lie between low %" PRId64 " and high %" PRId64
                         " or be the sentinel %" PRId64 ", but element %" PRId64 " is %" PRId64,
                         format.low, format.high, format.sentinel, index, value);
  return Status::error(StatusCode::kContractBroken,
                       "source must lie between low %" PRId64 " and high %" PRId64
                       ", but element %" PRId64 " is %" PRId64,
                       format.low, format.high, index, value);
}

Status check_contract(const NarrowFormat& format, const NarrowCode& code, const void* source,
                      const Execution& execution) {
  if (!core::kCheckContracts || format.count == 0) return {};
  if (execution.backend == Backend::kCuda) {
    std::int64_t index = -1, value = 0;
    BACKFOLD_RETURN_IF_ERROR(cuda::find_broken_bound(
        code, size_of(format.type), source, format.count, execution.stream, &index, &value));
    return index < 0 ? Status{} : broken_bound(format, index, value);
  }
  for (std::int64_t i = 0; i < format.count; ++i) {
    const std::int64_t value = element_at(format.type, source, i);
    if (!core::keeps_bound(code, static_cast<std::uint64_t>(value)))
      return broken_bound(format, i, value);
  }
  return {};
}

std::size_t total_bytes(const NarrowFormat& format, const NarrowCode& code) {
  return core::padded(static_cast<std::size_t>(format.count) *
                      static_cast<std::size_t>(code.code_bytes));
}

}  // namespace

Status validate(const NarrowFormat& format) {
  const auto error = StatusCode::kInvalidArgument;
  switch (format.type) {
    case ElementType::kI64:
    case ElementType::kI32:
    case ElementType::kI16:
      break;
    default:
      return Status::error(error, "type must be int64, int32 or int16, got %s (%d)",
                           name_of(format.type), static_cast<int>(format.type));
  }
  BACKFOLD_RETURN_IF_ERROR(core::check_count(format.count));
  BACKFOLD_RETURN_IF_ERROR(check_holds(format.type, "low", format.low));
  BACKFOLD_RETURN_IF_ERROR(check_holds(format.type, "high", format.high));
  if (format.low > format.high)
    return Status::error(error, "low must not be above high, got %" PRId64 " and %" PRId64,
                         format.low, format.high);
  if (format.has_sentinel) {
    BACKFOLD_RETURN_IF_ERROR(check_holds(format.type, "sentinel", format.sentinel));
    if (format.sentinel >= format.low && format.sentinel <= format.high)
      return Status::error(
          error, "sentinel must lie outside low %" PRId64 " to high %" PRId64 ", got %" PRId64,
          format.low, format.high, format.sentinel);
  }
  if (static_cast<std::size_t>(code_of(format).code_bytes) >= size_of(format.type))
    return Status::error(error,
                         "low %" PRId64 " to high %" PRId64
                         "%s need codes no narrower than %s: keep the elements as they are",
                         format.low, format.high, format.has_sentinel ? " and a sentinel" : "",
                         name_of(format.type));
  return {};
}

std::size_t packed_bytes(const NarrowFormat& format) {
  return validate(format).ok() ? total_bytes(format, code_of(format)) : 0;
}

std::size_t code_bytes(const NarrowFormat& format) {
  return validate(format).ok() ? static_cast<std::size_t>(code_of(format).code_bytes) : 0;
}

Status pack(const NarrowFormat& format, const void* source, Payload payload,
            const Execution& execution) {
  BACKFOLD_RETURN_IF_ERROR(validate(format));
  const NarrowCode code = code_of(format);
  const std::size_t size = size_of(format.type);
  const std::size_t total = total_bytes(format, code);
  BACKFOLD_RETURN_IF_ERROR(
      core::check_call(execution, "source", source, format.count, size, payload, total));
  BACKFOLD_RETURN_IF_ERROR(check_contract(format, code, source, execution));

  if (core::choose_cuda(execution))
    return cuda::encode(code, size, source, format.count, payload.data, execution.stream);
  const auto kernels = core::choose_kernels(execution, cpu::narrow_kernels);
  char* const codes = static_cast<char*>(payload.data);
  const auto width = static_cast<std::size_t>(code.code_bytes);
  core::split_elements(format.count, execution, [&](std::int64_t first, std::int64_t count) {
    const auto start = static_cast<std::size_t>(first);
    const void* from = static_cast<const char*>(source) + start * size;
    void* to = codes + start * width;
    if (kernels)
      kernels->encode(code, size, from, count, to);
    else
      core::reference_encode(code, size, from, count, to);
  });
  const std::size_t used = static_cast<std::size_t>(format.count) * width;
  if (used < total) std::memset(codes + used, 0, total - used);
  return {};
}

Status unpack(const NarrowFormat& format, ConstPayload payload, void* destination,
              const Execution& execution) {
  BACKFOLD_RETURN_IF_ERROR(validate(format));
  const NarrowCode code = code_of(format);
  const std::size_t size = size_of(format.type);
  BACKFOLD_RETURN_IF_ERROR(core::check_call(execution, "destination", destination, format.count,
                                            size, payload, total_bytes(format, code)));

  if (core::choose_cuda(execution))
    return cuda::decode(code, size, payload.data, format.count, destination, execution.stream);
  const auto kernels = core::choose_kernels(execution, cpu::narrow_kernels);
  core::split_elements(format.count, execution, [&](std::int64_t first, std::int64_t count) {
    const auto start = static_cast<std::size_t>(first);
    const void* from =
        static_cast<const char*>(payload.data) + start * static_cast<std::size_t>(code.code_bytes);
    void* to = static_cast<char*>(destination) + start * size;
    if (kernels)
      kernels->decode(code, size, from, count, to);
    else
      core::reference_decode(code, size, from, count, to);
  });
  return {};
}

}  // namespace backfold
