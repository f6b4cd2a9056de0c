// SPDX-License-Identifier: Apache-2.0
//
// Where the samples of a tensor lie in a payload. Shared by every backend.

#ifndef BACKFOLD_SAMPLES_GEOMETRY_H_
#define BACKFOLD_SAMPLES_GEOMETRY_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "backfold/group.h"
#include "backfold/samples.h"
#include "base/checks.h"
#include "samples/score.h"

namespace backfold::core {

inline constexpr std::size_t kSampleSections = kSampleWidths.size();

// The samples of one width; offsets count bytes from the start of the payload.
struct SampleSection {
  int bits;
  std::int64_t first_slot;
  std::int64_t samples;
  std::size_t headers;
  std::size_t codes;
};

// A valid format, with its sizes worked out.
struct SampleGeometry {
  std::int64_t groups;  // of one sample
  std::size_t scores;   // bytes before the scores
  std::size_t body;     // bytes before the first section
  std::size_t bytes;    // of the payload
  std::array<SampleSection, kSampleSections> sections;

  explicit SampleGeometry(const SampleFormat& format)
      : groups((format.per_sample + kSampleGroup - 1) / kSampleGroup),
        scores(static_cast<std::size_t>(format.samples) * sizeof(std::uint32_t)),
        body(padded(2 * scores)),
        bytes(body) {
    std::int64_t slot = 0;
    for (std::size_t i = 0; i < kSampleSections; ++i) {
      const auto in_section = static_cast<std::size_t>(format.histogram[i] * groups);
      const std::size_t headers = padded(in_section * sizeof(std::uint32_t));
      sections[i] = {kSampleWidths[i], slot, format.histogram[i], bytes, bytes + headers};
      slot += format.histogram[i];
      bytes += headers + in_section * static_cast<std::size_t>(kSampleGroup * kSampleWidths[i] / 8);
    }
    if (format.samples == 0 || format.per_sample == 0) bytes = 0;
  }
};

// Where the groups of one sample start in a payload, and the group format that they have.
struct SamplePlace {
  std::uint32_t* headers;
  std::uint8_t* codes;
  GroupFormat format;
};

inline SamplePlace place_of(const SampleFormat& format, const SampleGeometry& geometry,
                            void* payload, std::uint32_t slot) {
  std::size_t i = kSampleSections - 1;
  while (i > 0 && geometry.sections[i].first_slot > static_cast<std::int64_t>(slot)) --i;
  const SampleSection& section = geometry.sections[i];
  const auto group = static_cast<std::size_t>((slot - section.first_slot) * geometry.groups);
  auto* const bytes = static_cast<std::uint8_t*>(payload);
  return {reinterpret_cast<std::uint32_t*>(bytes + section.headers) + group,
          bytes + section.codes + group * static_cast<std::size_t>(kSampleGroup * section.bits / 8),
          {.type = format.type,
           .bits = section.bits,
           .group = kSampleGroup,
           .count = format.per_sample}};
}

}  // namespace backfold::core

#endif  // BACKFOLD_SAMPLES_GEOMETRY_H_
