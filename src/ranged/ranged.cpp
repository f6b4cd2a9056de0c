// SPDX-License-Identifier: Apache-2.0
//
// The ranged quantizer's door: checks, sizes, and the choice of a backend.

#include "backfold/ranged.h"

#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <cmath>
#include <cstring>
#include <mutex>

#include "base/blocks.h"
#include "base/checks.h"
#include "base/dispatch.h"
#include "base/threads.h"
#include "ranged/cuda/ranged.h"
#include "ranged/reference.h"
#include "ranged/simd/ranged.h"

namespace backfold {
namespace {

using core::Bounds;
using core::Grid;
using core::RangedGeometry;

// Elements that are worth another thread.
constexpr std::int64_t kGrain = 65'536;

Status check_size(const char* argument, std::int64_t size) {
  if (size >= 0 && size <= kMaxElements) return {};
  return Status::error(StatusCode::kInvalidArgument, "%s must be between 0 and 2^48, got %" PRId64,
                       argument, size);
}

Status check_ranges(const char* argument, const float* ranges, const RangedFormat& format) {
  return core::check_buffer(argument, ranges, format.channels, sizeof(float));
}

const char* element_at(const RangedFormat& format, const void* data, std::int64_t index) {
  return static_cast<const char*>(data) + static_cast<std::size_t>(index) * size_of(format.type);
}

cpu::RangedKernels kernels_for(const Execution& execution) {
  if (const auto kernels = core::choose_kernels(execution, cpu::ranged_kernels)) return *kernels;
  return {0, core::reference_pack_ranged, core::reference_unpack_ranged, core::reference_widen_run,
          core::reference_widen_row};
}

// Widens `bounds` in place. Threads share channels out; only a tensor of one channel is cut
// elsewhere, and what its parts find is joined in any order.
void widen_on_host(const RangedFormat& format, const void* source, Bounds* bounds,
                   const cpu::RangedKernels& kernels, const Execution& execution) {
  if (format.channels == 1) {
    std::mutex joining;
    core::split_elements(
        format.outer * format.inner, execution, [&](std::int64_t first, std::int64_t count) {
          Bounds found = core::bounds_of(NAN, NAN);
          kernels.widen_run(format.type, element_at(format, source, first), count, &found);
          const std::lock_guard lock(joining);
          *bounds = core::joined(*bounds, found);
        });
    return;
  }
  const std::int64_t per_channel = std::max<std::int64_t>(1, format.outer * format.inner);
  core::split_over_threads(
      format.channels, std::max<std::int64_t>(1, kGrain / per_channel), execution,
      [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t row = 0; row < format.outer; ++row) {
          const std::int64_t first = row * format.channels;
          if (format.inner == 1) {
            kernels.widen_row(format.type, element_at(format, source, first + begin), end - begin,
                              bounds + begin);
            continue;
          }
          for (std::int64_t c = begin; c < end; ++c)
            kernels.widen_run(format.type, element_at(format, source, (first + c) * format.inner),
                              format.inner, bounds + c);
        }
      });
}

}  // namespace

Status validate(const RangedFormat& format) {
  BACKFOLD_RETURN_IF_ERROR(core::check_float_type(format.type));
  if (std::ranges::count(core::kRangedWidths, format.bits) == 0)
    return Status::error(StatusCode::kInvalidArgument, "bits must be 2, 4 or 8, got %d",
                         format.bits);
  BACKFOLD_RETURN_IF_ERROR(check_size("outer", format.outer));
  BACKFOLD_RETURN_IF_ERROR(check_size("channels", format.channels));
  BACKFOLD_RETURN_IF_ERROR(check_size("inner", format.inner));
  const std::int64_t rows = std::max<std::int64_t>(1, format.outer);
  const std::int64_t row = std::max<std::int64_t>(1, format.channels);
  const std::int64_t run = std::max<std::int64_t>(1, format.inner);
  if (row > kMaxElements / rows || run > kMaxElements / (rows * row))
    return Status::error(StatusCode::kInvalidArgument,
                         "outer x channels x inner must be at most 2^48 elements, got %" PRId64
                         " x %" PRId64 " x %" PRId64,
                         format.outer, format.channels, format.inner);
  return {};
}

std::size_t packed_bytes(const RangedFormat& format) {
  return validate(format).ok() ? RangedGeometry(format).bytes() : 0;
}

Status pack(const RangedFormat& format, const void* source, const float* ranges, const Key& key,
            Payload payload, const Execution& execution) {
  BACKFOLD_RETURN_IF_ERROR(validate(format));
  const RangedGeometry geometry(format);
  BACKFOLD_RETURN_IF_ERROR(core::check_call(execution, "source", source, geometry.count,
                                            size_of(format.type), payload, geometry.bytes()));
  BACKFOLD_RETURN_IF_ERROR(check_ranges("ranges", ranges, format));
  const core::MixedKey mixed = core::mixed_for(key, execution);

  if (core::choose_cuda(execution))
    return cuda::pack_ranged(format, source, ranges, mixed, payload.data, execution.stream);
  const cpu::RangedKernels kernels = kernels_for(execution);
  if (geometry.bytes() == 0) return {};
  Grid* const grids = static_cast<Grid*>(payload.data);
  std::uint8_t* const bytes = static_cast<std::uint8_t*>(payload.data);
  std::uint8_t* const codes = bytes + geometry.header_bytes;
  const core::Levels levels = core::ranged_levels(format.bits);
  for (std::int64_t c = 0; c < format.channels; ++c)
    grids[c] = core::ranged_grid(ranges[2 * c], ranges[2 * c + 1], levels);
  const std::size_t headers = static_cast<std::size_t>(format.channels) * sizeof(Grid);
  std::memset(bytes + headers, 0, geometry.header_bytes - headers);
  // A NaN in the headers would change the codes that another thread draws: they are marked last.
  std::atomic<bool> all_finite = true;
  core::split_elements(geometry.count, execution, [&](std::int64_t first, std::int64_t count) {
    if (!kernels.pack(format, source, grids, mixed, first, count, codes)) all_finite = false;
  });
  if (!all_finite) core::mark_non_finite(format, source, grids);
  const std::size_t used = static_cast<std::size_t>((geometry.count * format.bits + 7) / 8);
  std::memset(codes + used, 0, geometry.code_bytes - used);
  return {};
}

Status unpack(const RangedFormat& format, ConstPayload payload, void* destination,
              const Execution& execution) {
  BACKFOLD_RETURN_IF_ERROR(validate(format));
  const RangedGeometry geometry(format);
  BACKFOLD_RETURN_IF_ERROR(core::check_call(execution, "destination", destination, geometry.count,
                                            size_of(format.type), payload, geometry.bytes()));

  if (core::choose_cuda(execution))
    return cuda::unpack_ranged(format, payload.data, destination, execution.stream);
  const cpu::RangedKernels kernels = kernels_for(execution);
  if (geometry.count == 0) return {};
  const Grid* const grids = static_cast<const Grid*>(payload.data);
  const std::uint8_t* const codes =
      static_cast<const std::uint8_t*>(payload.data) + geometry.header_bytes;
  core::split_elements(geometry.count, execution, [&](std::int64_t first, std::int64_t count) {
    kernels.unpack(format, grids, codes, first, count, destination);
  });
  return {};
}

Status expected_squared_error(const RangedFormat& format, const void* source, const float* ranges,
                              double* error) {
  BACKFOLD_RETURN_IF_ERROR(validate(format));
  BACKFOLD_RETURN_IF_ERROR(
      core::check_buffer("source", source, RangedGeometry(format).count, size_of(format.type)));
  BACKFOLD_RETURN_IF_ERROR(check_ranges("ranges", ranges, format));
  if (error == nullptr)
    return Status::error(StatusCode::kInvalidArgument, "error must not be null");
  const core::Levels levels = core::ranged_levels(format.bits);
  *error = 0.0;
  for (std::int64_t c = 0; c < format.channels; ++c)
    *error += core::reference_channel_error(
        format, source, c, core::ranged_grid(ranges[2 * c], ranges[2 * c + 1], levels));
  return {};
}

Status widen(const RangedFormat& format, const void* source, const float* ranges, float* widened,
             const Execution& execution) {
  BACKFOLD_RETURN_IF_ERROR(validate(format));
  BACKFOLD_RETURN_IF_ERROR(core::check_execution(execution));
  BACKFOLD_RETURN_IF_ERROR(
      core::check_buffer("source", source, RangedGeometry(format).count, size_of(format.type)));
  BACKFOLD_RETURN_IF_ERROR(check_ranges("ranges", ranges, format));
  BACKFOLD_RETURN_IF_ERROR(check_ranges("widened", widened, format));

  if (core::choose_cuda(execution))
    return cuda::widen_ranges(format, source, ranges, widened, execution.stream);
  const cpu::RangedKernels kernels = kernels_for(execution);
  Bounds* const bounds = reinterpret_cast<Bounds*>(widened);
  for (std::int64_t c = 0; c < format.channels; ++c)
    bounds[c] = core::bounds_of(ranges[2 * c], ranges[2 * c + 1]);
  widen_on_host(format, source, bounds, kernels, execution);
  return {};
}

}  // namespace backfold
