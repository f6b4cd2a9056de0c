// SPDX-License-Identifier: Apache-2.0

#include "backfold/copy.h"

#include <cinttypes>
#include <cstring>

#include "base/checks.h"
#include "base/dispatch.h"
#include "base/threads.h"
#include "lossless/cuda/copy.h"

namespace backfold {
namespace {

constexpr std::int64_t kMaxBytes = 8 * kMaxElements;

// Bytes that are worth another thread.
constexpr std::int64_t kGrain = std::int64_t{1} << 20;

Status copy(const void* source, void* destination, std::int64_t bytes, const Execution& execution) {
  if (core::choose_cuda(execution))
    return cuda::copy(source, destination, static_cast<std::size_t>(bytes), execution.stream);
  core::report_target(execution, 0);
  core::split_over_threads(bytes, kGrain, execution, [&](std::int64_t begin, std::int64_t end) {
    std::memcpy(static_cast<char*>(destination) + begin, static_cast<const char*>(source) + begin,
                static_cast<std::size_t>(end - begin));
  });
  return {};
}

}  // namespace

Status validate(const CopyFormat& format) {
  if (format.bytes >= 0 && format.bytes <= kMaxBytes) return {};
  return Status::error(StatusCode::kInvalidArgument,
                       "bytes must be between 0 and 2^51, got %" PRId64, format.bytes);
}

std::size_t packed_bytes(const CopyFormat& format) {
  return validate(format).ok() ? static_cast<std::size_t>(format.bytes) : 0;
}

Status pack(const CopyFormat& format, const void* source, Payload payload,
            const Execution& execution) {
  BACKFOLD_RETURN_IF_ERROR(validate(format));
  BACKFOLD_RETURN_IF_ERROR(core::check_call(execution, "source", source, format.bytes, 1, payload,
                                            packed_bytes(format)));
  return copy(source, payload.data, format.bytes, execution);
}

Status unpack(const CopyFormat& format, ConstPayload payload, void* destination,
              const Execution& execution) {
  BACKFOLD_RETURN_IF_ERROR(validate(format));
  BACKFOLD_RETURN_IF_ERROR(core::check_call(execution, "destination", destination, format.bytes, 1,
                                            payload, packed_bytes(format)));
  return copy(payload.data, destination, format.bytes, execution);
}

}  // namespace backfold
