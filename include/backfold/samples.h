// SPDX-License-Identifier: Apache-2.0
//
// Group quantizer with a width for each sample: mixed precision inside one tensor, unbiased.
//
// A tensor is read as samples x per_sample. The format says how many samples get which width, so
// the payload's size needs no look at the data; the data decide which ones, so no host waits. The
// samples with the largest scores get the widest codes:
//
//   score = sum over the sample's groups of (largest - smallest element)^2
//
// times the sample's weight. A step is proportional to its group's range, so this is the order in
// which a bit more removes the most error, weighted.
//
// Groups. Each sample is cut into groups of 128 consecutive elements. The last one may be shorter;
// it takes the room of a whole one, and its missing codes are 0.
//
// Bytes. A table:
//
//   slots    one 32-bit word per sample, in the order of the samples
//   scores   one fp32 number per sample, before weights, in the order of the samples
//
// padded with zero bytes to a multiple of 16. Then one section for each of kSampleWidths that
// samples have, narrow to wide. A section of s samples is what the group quantizer (group.h) writes
// for s * (groups of a sample) flat groups of 128: headers, padding, codes. Slots count through the
// sections: the samples of the narrowest width have slots 0, 1, ..., those of the next follow. The
// groups of the sample with the k-th slot of a section are that section's groups k * (groups of a
// sample) and on. What is no slot decodes as the last one.
//
// Ranking. Slots rise with weight * score, rounded to fp32; products below 2^-126 in magnitude are
// 0. One that is not finite, or beyond fp32, ranks above all others. Of two that are equal, the
// sample of the lower index has the higher slot.
//
// Score. Elements are fp32 numbers as in group.h. A range below 2^-60 counts 0, the square of one
// that is not finite is +inf. Squares are added in fp32: those of 32 consecutive groups as a
// balanced tree, neighbours first; lane l of 32 adds the sums l, l + 32, ... of these in turn; then
// the lanes as a tree again. Missing terms are 0. So a score is 0 or more, and never NaN.
//
// Random numbers are those of the group quantizer for group number sample * (groups of a sample) +
// (group in the sample). Where 128 divides per_sample, a sample has the codes that the group
// quantizer would give it at that width as part of the whole tensor.
//
// Unbiased, as group.h says, given the slots: they depend on the source, never on the key.

#ifndef BACKFOLD_SAMPLES_H_
#define BACKFOLD_SAMPLES_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "backfold/execution.h"
#include "backfold/status.h"
#include "backfold/types.h"
#include "backfold/widths.h"

namespace backfold {

inline constexpr auto kSampleWidths = kCodeWidths;

// On a GPU each 128 samples are ranked by a thread block that goes over all: 20 us for this many.
inline constexpr std::int64_t kMaxSamples = 16'384;

struct SampleFormat {
  ElementType type = ElementType::kF32;  // fp32, fp16, bf16 or fp64; of source and result
  std::int64_t samples = 0;              // at most kMaxSamples
  std::int64_t per_sample = 0;           // elements of one sample
  // Samples of each of kSampleWidths; sums to samples.
  std::array<std::int64_t, kSampleWidths.size()> histogram{};
};

// Says what is wrong with a format: a value that is not allowed, a histogram that does not sum to
// the samples, a width whose codes are not smaller than their source.
Status validate(const SampleFormat& format);

// Bytes of the payload: a function of the format alone. 0 for a format that validate() refuses and
// for one without elements.
std::size_t packed_bytes(const SampleFormat& format);

// Bytes of the payload before its scores. 0 for a format that validate() refuses.
std::size_t scores_offset(const SampleFormat& format);

// Packs samples * per_sample contiguous elements, aligned to their size. `weights` holds one fp32
// number for each sample, in the memory where the backend works; null means 1 for all. Reads the
// source twice and never writes it.
Status pack(const SampleFormat& format, const void* source, const float* weights, const Key& key,
            Payload payload, const Execution& execution);

// Restores samples * per_sample elements. Every payload of the right size decodes to something;
// none makes it read or write out of bounds.
Status unpack(const SampleFormat& format, ConstPayload payload, void* destination,
              const Execution& execution);

// Sum over the elements of the expected squared error that packing adds, as for the group
// quantizer. Host memory only.
Status expected_squared_error(const SampleFormat& format, const void* source, const float* weights,
                              double* error);

}  // namespace backfold

#endif  // BACKFOLD_SAMPLES_H_
