// SPDX-License-Identifier: Apache-2.0
//
// The sample quantizer's door: checks, sizes, and the choice of a backend.

#include "backfold/samples.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <vector>

#include "base/checks.h"
#include "base/dispatch.h"
#include "base/threads.h"
#include "group/simd/group.h"
#include "samples/cuda/samples.h"
#include "samples/geometry.h"
#include "samples/reference.h"
#include "samples/simd/samples.h"

namespace backfold {
namespace {

using core::SampleGeometry;
using core::SamplePlace;
using core::SampleSection;

// Groups that are worth another thread, as for the group quantizer.
constexpr std::int64_t kGrain = 512;

Status check_histogram(const SampleFormat& format) {
  const auto error = StatusCode::kInvalidArgument;
  std::int64_t sum = 0;
  for (std::size_t i = 0; i < kSampleWidths.size(); ++i) {
    const std::int64_t samples = format.histogram[i];
    if (samples < 0 || samples > format.samples)
      return Status::error(
          error, "histogram must be between 0 and samples %" PRId64 ", got %" PRId64 " of width %d",
          format.samples, samples, kSampleWidths[i]);
    if (samples > 0 && kSampleWidths[i] >= static_cast<int>(size_of(format.type)) * 8)
      return Status::error(error,
                           "histogram must be 0 for widths that the source has, got %" PRId64
                           " of width %d for %s: a packet would not be smaller than its source",
                           samples, kSampleWidths[i], name_of(format.type));
    sum += samples;
  }
  if (sum == format.samples) return {};
  return Status::error(error, "histogram must sum to samples %" PRId64 ", got %" PRId64,
                       format.samples, sum);
}

std::int64_t count_of(const SampleFormat& format) { return format.samples * format.per_sample; }

Status check_weights(const float* weights, const SampleFormat& format) {
  if (weights == nullptr) return {};
  return core::check_buffer("weights", weights, format.samples, sizeof(float));
}

const char* sample_at(const SampleFormat& format, const void* data, std::int64_t sample) {
  return static_cast<const char*>(data) +
         static_cast<std::size_t>(sample * format.per_sample) * size_of(format.type);
}

// Calls work(sample) for every sample, on the threads of the execution.
template <typename Work>
void for_samples(const SampleFormat& format, const SampleGeometry& geometry,
                 const Execution& execution, const Work& work) {
  core::split_over_threads(format.samples, std::max<std::int64_t>(1, kGrain / geometry.groups),
                           execution, [&](std::int64_t begin, std::int64_t end) {
                             for (std::int64_t sample = begin; sample < end; ++sample) work(sample);
                           });
}

void zero_padding(const SampleGeometry& geometry, char* payload) {
  const auto zero = [&](std::size_t begin, std::size_t end) {
    std::memset(payload + begin, 0, end - begin);
  };
  zero(2 * geometry.scores, geometry.body);
  for (const SampleSection& section : geometry.sections)
    zero(section.headers +
             static_cast<std::size_t>(section.samples * geometry.groups) * sizeof(std::uint32_t),
         section.codes);
}

}  // namespace

Status validate(const SampleFormat& format) {
  const auto error = StatusCode::kInvalidArgument;
  BACKFOLD_RETURN_IF_ERROR(core::check_float_type(format.type));
  if (format.samples < 0 || format.samples > kMaxSamples)
    return Status::error(error, "samples must be between 0 and %" PRId64 ", got %" PRId64,
                         kMaxSamples, format.samples);
  const std::int64_t most = kMaxElements / std::max<std::int64_t>(1, format.samples);
  if (format.per_sample < 0 || format.per_sample > most)
    return Status::error(
        error, "per_sample must be between 0 and %" PRId64 " for %" PRId64 " samples, got %" PRId64,
        most, format.samples, format.per_sample);
  return check_histogram(format);
}

std::size_t packed_bytes(const SampleFormat& format) {
  return validate(format).ok() ? SampleGeometry(format).bytes : 0;
}

std::size_t scores_offset(const SampleFormat& format) {
  return validate(format).ok() ? SampleGeometry(format).scores : 0;
}

Status pack(const SampleFormat& format, const void* source, const float* weights, const Key& key,
            Payload payload, const Execution& execution) {
  BACKFOLD_RETURN_IF_ERROR(validate(format));
  const SampleGeometry geometry(format);
  BACKFOLD_RETURN_IF_ERROR(core::check_call(execution, "source", source, count_of(format),
                                            size_of(format.type), payload, geometry.bytes));
  BACKFOLD_RETURN_IF_ERROR(check_weights(weights, format));
  const core::MixedKey mixed = core::mixed_for(key, execution);

  if (core::choose_cuda(execution))
    return cuda::pack_samples(format, source, weights, mixed, payload.data, execution.stream);
  const auto scoring = core::choose_kernels(execution, cpu::sample_kernels);
  const auto kernels = core::choose_kernels(execution, cpu::group_packers);
  if (geometry.bytes == 0) return {};
  char* const bytes = static_cast<char*>(payload.data);
  auto* const slots = reinterpret_cast<std::uint32_t*>(bytes);
  auto* const scores = reinterpret_cast<float*>(bytes + geometry.scores);
  // Codes come later: what is going to be theirs holds the order meanwhile.
  auto* const order = reinterpret_cast<std::uint32_t*>(bytes + geometry.body);
  for_samples(format, geometry, execution, [&](std::int64_t sample) {
    const void* first = sample_at(format, source, sample);
    scores[sample] = scoring ? scoring->score(format, first) : core::reference_score(format, first);
  });
  core::order_samples(scores, weights, format.samples, order);
  for (std::int64_t slot = 0; slot < format.samples; ++slot)
    slots[order[slot]] = static_cast<std::uint32_t>(slot);

  zero_padding(geometry, bytes);
  for_samples(format, geometry, execution, [&](std::int64_t sample) {
    const SamplePlace place = core::place_of(format, geometry, bytes, slots[sample]);
    const void* first = sample_at(format, source, sample);
    const std::int64_t group = sample * geometry.groups;
    if (!kernels) return core::reference_pack_sample(place, first, mixed, group);
    kernels->pack_run(place.format, first, mixed, group, place.headers, place.codes);
  });
  return {};
}

Status unpack(const SampleFormat& format, ConstPayload payload, void* destination,
              const Execution& execution) {
  BACKFOLD_RETURN_IF_ERROR(validate(format));
  const SampleGeometry geometry(format);
  BACKFOLD_RETURN_IF_ERROR(core::check_call(execution, "destination", destination, count_of(format),
                                            size_of(format.type), payload, geometry.bytes));

  if (core::choose_cuda(execution))
    return cuda::unpack_samples(format, payload.data, destination, execution.stream);
  const auto kernels = core::choose_kernels(execution, cpu::group_unpackers);
  if (geometry.bytes == 0) return {};
  void* const bytes = const_cast<void*>(payload.data);  // only read below
  const auto* slots = static_cast<const std::uint32_t*>(payload.data);
  const auto last = static_cast<std::uint32_t>(format.samples - 1);
  for_samples(format, geometry, execution, [&](std::int64_t sample) {
    const SamplePlace place =
        core::place_of(format, geometry, bytes, std::min(slots[sample], last));
    void* first = const_cast<char*>(sample_at(format, destination, sample));
    if (!kernels) return core::reference_unpack_sample(place, first);
    kernels->unpack_run(place.format, place.headers, place.codes, first);
  });
  return {};
}

Status expected_squared_error(const SampleFormat& format, const void* source, const float* weights,
                              double* error) {
  BACKFOLD_RETURN_IF_ERROR(validate(format));
  BACKFOLD_RETURN_IF_ERROR(
      core::check_buffer("source", source, count_of(format), size_of(format.type)));
  BACKFOLD_RETURN_IF_ERROR(check_weights(weights, format));
  if (error == nullptr)
    return Status::error(StatusCode::kInvalidArgument, "error must not be null");
  *error = 0.0;
  if (count_of(format) == 0) return {};
  std::vector<float> scores(static_cast<std::size_t>(format.samples));
  std::vector<std::uint32_t> order(scores.size());
  for (std::size_t i = 0; i < scores.size(); ++i)
    scores[i] =
        core::reference_score(format, sample_at(format, source, static_cast<std::int64_t>(i)));
  core::order_samples(scores.data(), weights, format.samples, order.data());
  for (const SampleSection& section : SampleGeometry(format).sections) {
    const GroupFormat group{.type = format.type,
                            .bits = section.bits,
                            .group = core::kSampleGroup,
                            .count = format.per_sample};
    for (std::int64_t slot = section.first_slot; slot < section.first_slot + section.samples;
         ++slot)
      *error += core::reference_sample_error(
          group, sample_at(format, source, order[static_cast<std::size_t>(slot)]));
  }
  return {};
}

}  // namespace backfold
