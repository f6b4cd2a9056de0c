// SPDX-License-Identifier: Apache-2.0
//
// Pooling's door: checks, sizes, and the choice of a backend.

#include "backfold/pool.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>

#include "base/checks.h"
#include "base/dispatch.h"
#include "base/threads.h"
#include "pool/cuda/pool.h"
#include "pool/geometry.h"
#include "pool/reference.h"
#include "pool/simd/pool.h"

namespace backfold {
namespace {

using core::PoolParts;
using core::PoolShape;

// Elements that are worth another thread: about 20 us of work.
constexpr std::int64_t kGrain = 65'536;

Status check_sizes(const PoolFormat& format) {
  const auto error = StatusCode::kInvalidArgument;
  const struct {
    const char* name;
    std::int64_t size, least;
  } sizes[] = {{"outer", format.outer, 0},
               {"depth", format.depth, 1},
               {"height", format.height, 1},
               {"width", format.width, 1},
               {"inner", format.inner, 1}};
  std::int64_t product = 1;
  for (const auto& [name, size, least] : sizes) {
    if (size < least || size > kMaxElements)
      return Status::error(error, "%s must be between %" PRId64 " and 2^48, got %" PRId64, name,
                           least, size);
    if (size > 0 && product > kMaxElements / size)
      return Status::error(error,
                           "outer, depth, height, width and inner must hold at most 2^48 "
                           "elements together");
    product *= std::max<std::int64_t>(size, 1);
  }
  return {};
}

Status check_values(const PoolFormat& format) {
  const auto error = StatusCode::kInvalidArgument;
  BACKFOLD_RETURN_IF_ERROR(core::check_float_type(format.type));
  if (format.block < 2 || format.block > 16)
    return Status::error(error, "block must be between 2 and 16, got %d", format.block);
  if (format.bits < 0 || format.bits > 8 || (format.bits > 4 && format.bits < 8))
    return Status::error(error, "bits must be one of 0, 1, 2, 3, 4, 8, got %d", format.bits);
  return check_sizes(format);
}

std::size_t source_bytes(const PoolFormat& format) {
  return static_cast<std::size_t>(count(format)) * size_of(format.type);
}

// Where the parts of a payload end that bands do not fill.
void zero_padding(const PoolShape& shape, void* payload) {
  char* bytes = static_cast<char*>(payload);
  const auto zero = [&](std::size_t from, std::size_t to) {
    std::memset(bytes + from, 0, to - from);
  };
  zero(static_cast<std::size_t>(shape.blocks()) * 2, shape.header_offset());
  if (shape.bits == 0) return;
  zero(shape.header_offset() + static_cast<std::size_t>(shape.bands) * 4, shape.code_offset());
  const std::int64_t words = core::first_word(shape.count(), shape.bits, shape.bands);
  zero(shape.code_offset() + static_cast<std::size_t>(words) * 4, shape.bytes());
}

// Bands that are worth another thread.
std::int64_t grain_of(const PoolShape& shape) {
  return std::max<std::int64_t>(1, kGrain / (shape.slots * shape.room));
}

}  // namespace

Status validate(const PoolFormat& format) {
  const auto error = StatusCode::kInvalidArgument;
  BACKFOLD_RETURN_IF_ERROR(check_values(format));
  if (format.depth == 1 && format.height == 1 && format.width == 1)
    return Status::error(error,
                         "one of depth, height and width must be more than 1: there is "
                         "nothing to pool");
  if (format.depth > 1 && format.height > 1 && format.width > 1 && format.block > 8)
    return Status::error(error,
                         "block must be at most 8 where depth, height and width are pooled, got %d",
                         format.block);
  const std::size_t packed = PoolShape(format).bytes();
  if (count(format) > 0 && packed >= source_bytes(format))
    return Status::error(error,
                         "a packet of block %d and %d bits would take %zu bytes, and must be "
                         "smaller than its source of %zu bytes",
                         format.block, format.bits, packed, source_bytes(format));
  return {};
}

std::size_t packed_bytes(const PoolFormat& format) {
  return validate(format).ok() ? PoolShape(format).bytes() : 0;
}

Status pack(const PoolFormat& format, const void* source, const Key& key, Payload payload,
            const Execution& execution) {
  BACKFOLD_RETURN_IF_ERROR(validate(format));
  const PoolShape shape(format);
  BACKFOLD_RETURN_IF_ERROR(core::check_call(execution, "source", source, shape.count(),
                                            size_of(format.type), payload, shape.bytes()));
  const core::MixedKey mixed = core::mixed_for(key, execution);

  if (core::choose_cuda(execution))
    return cuda::pack_pool(shape, format.type, source, mixed, payload.data, execution.stream);
  const auto kernels = core::choose_kernels(execution, cpu::pool_kernels);
  if (shape.bands == 0) return {};
  const PoolParts parts(shape, payload.data);
  zero_padding(shape, payload.data);
  core::split_over_threads(
      shape.bands, grain_of(shape), execution, [&](std::int64_t begin, std::int64_t end) {
        if (kernels) return kernels->pack(shape, format.type, source, mixed, parts, begin, end);
        for (std::int64_t band = begin; band < end; ++band)
          core::reference_pack_band(shape, format.type, source, mixed, parts, band);
      });
  return {};
}

Status unpack(const PoolFormat& format, ConstPayload payload, void* destination,
              const Execution& execution) {
  BACKFOLD_RETURN_IF_ERROR(validate(format));
  const PoolShape shape(format);
  BACKFOLD_RETURN_IF_ERROR(core::check_call(execution, "destination", destination, shape.count(),
                                            size_of(format.type), payload, shape.bytes()));

  if (core::choose_cuda(execution))
    return cuda::unpack_pool(shape, format.type, payload.data, destination, execution.stream);
  const auto kernels = core::choose_kernels(execution, cpu::pool_kernels);
  if (shape.bands == 0) return {};
  const PoolParts parts(shape, const_cast<void*>(payload.data));  // only read below
  core::split_over_threads(
      shape.bands, grain_of(shape), execution, [&](std::int64_t begin, std::int64_t end) {
        if (kernels) return kernels->unpack(shape, format.type, parts, destination, begin, end);
        for (std::int64_t band = begin; band < end; ++band)
          core::reference_unpack_band(shape, format.type, parts, destination, band);
      });
  return {};
}

Status expected_squared_error(const PoolFormat& format, const void* source, double* error) {
  BACKFOLD_RETURN_IF_ERROR(validate(format));
  BACKFOLD_RETURN_IF_ERROR(
      core::check_buffer("source", source, count(format), size_of(format.type)));
  if (error == nullptr)
    return Status::error(StatusCode::kInvalidArgument, "error must not be null");
  const PoolShape shape(format);
  *error = 0.0;
  for (std::int64_t band = 0; band < shape.bands; ++band)
    *error += core::reference_band_error(shape, format.type, source, band);
  return {};
}

}  // namespace backfold
