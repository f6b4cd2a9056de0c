// SPDX-License-Identifier: Apache-2.0
//
// The sample quantizer in plain scalar loops, one sample at a time, and the order of samples on the
// host. SIMD kernels call it for groups off their fast path.

#ifndef BACKFOLD_SAMPLES_REFERENCE_H_
#define BACKFOLD_SAMPLES_REFERENCE_H_

#include <cstdint>

#include "base/rng.h"
#include "samples/geometry.h"

namespace backfold::core {

// The term of a group of `count` elements.
float reference_squared_range(ElementType type, const void* first, std::int64_t count);

// The score of the sample whose elements start at `first`.
float reference_score(const SampleFormat& format, const void* first);

// Sorts samples by rising slot: order[slot] is the sample's number. Weights may be null.
void order_samples(const float* scores, const float* weights, std::int64_t samples,
                   std::uint32_t* order);

// Packs the sample that starts at `first` to its place; its first group draws as number `group`.
void reference_pack_sample(const SamplePlace& place, const void* first, MixedKey key,
                           std::int64_t group);

void reference_unpack_sample(const SamplePlace& place, void* first);

// A sample's share of expected_squared_error(), at a width.
double reference_sample_error(const GroupFormat& format, const void* first);

}  // namespace backfold::core

#endif  // BACKFOLD_SAMPLES_REFERENCE_H_
