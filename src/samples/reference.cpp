// SPDX-License-Identifier: Apache-2.0

#include "samples/reference.h"

#include <algorithm>
#include <numeric>

#include "base/convert.h"
#include "group/geometry.h"
#include "group/reference.h"

namespace backfold::core {
namespace {

// Calls visit(group, span, offset in bytes) for each group of a sample.
template <typename Visit>
void for_groups(const GroupFormat& format, Visit visit) {
  const std::int64_t groups = GroupGeometry(format).groups;
  for (std::int64_t group = 0; group < groups; ++group) {
    const GroupSpan span = span_of(format, group);
    visit(group, span, static_cast<std::size_t>(span.offset) * size_of(format.type));
  }
}

}  // namespace

float reference_squared_range(ElementType type, const void* first, std::int64_t count) {
  return with_element(type, [&]<typename T>() {
    const T* elements = static_cast<const T*>(first);
    float low = to_float(elements[0]), high = low;
    for (std::int64_t i = 0; i < count; ++i) {
      const float value = to_float(elements[i]);
      if (!is_finite(value)) return squared_range(value, value);
      low = std::min(low, value);
      high = std::max(high, value);
    }
    return squared_range(low, high);
  });
}

float reference_score(const SampleFormat& format, const void* first) {
  Score score;
  for_groups({.type = format.type, .group = kSampleGroup, .count = format.per_sample},
             [&](std::int64_t, const GroupSpan& span, std::size_t offset) {
               score.add(reference_squared_range(
                   format.type, static_cast<const char*>(first) + offset, span.count));
             });
  return score.total();
}

void order_samples(const float* scores, const float* weights, std::int64_t samples,
                   std::uint32_t* order) {
  std::iota(order, order + samples, 0u);
  const auto key = [&](std::uint32_t sample) {
    return rank_key(scores[sample], weights == nullptr ? 1.0f : weights[sample]);
  };
  std::sort(order, order + samples, [&](std::uint32_t a, std::uint32_t b) {
    const std::uint32_t key_a = key(a), key_b = key(b);
    return key_a != key_b ? key_a < key_b : a > b;
  });
}

void reference_pack_sample(const SamplePlace& place, const void* first, MixedKey key,
                           std::int64_t group) {
  const std::size_t code_bytes = GroupGeometry(place.format).code_bytes;
  for_groups(place.format, [&](std::int64_t i, const GroupSpan& span, std::size_t offset) {
    reference_pack_group(place.format, static_cast<const char*>(first) + offset, 1, span.count, key,
                         static_cast<std::uint64_t>(group + i), place.headers + i,
                         place.codes + static_cast<std::size_t>(i) * code_bytes);
  });
}

void reference_unpack_sample(const SamplePlace& place, void* first) {
  const std::size_t code_bytes = GroupGeometry(place.format).code_bytes;
  for_groups(place.format, [&](std::int64_t i, const GroupSpan& span, std::size_t offset) {
    reference_unpack_group(place.format, place.headers[i],
                           place.codes + static_cast<std::size_t>(i) * code_bytes,
                           static_cast<char*>(first) + offset, 1, span.count);
  });
}

double reference_sample_error(const GroupFormat& format, const void* first) {
  double error = 0.0;
  for_groups(format, [&](std::int64_t, const GroupSpan& span, std::size_t offset) {
    error += reference_group_error(format, static_cast<const char*>(first) + offset, 1, span.count);
  });
  return error;
}

}  // namespace backfold::core
