// SPDX-License-Identifier: Apache-2.0
//
// The sample quantizer: its bytes on every backend, which samples get which width, and what that
// gains.

#include "backfold/samples.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "backfold/group.h"
#include "core/group_data.h"
#include "core/support.h"

namespace backfold::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Shares of samples that most tests use: 40% at 1 bit, 35% at 2, 20% at 4, the rest at 8.
SampleFormat mixed_format(ElementType type, std::int64_t samples, std::int64_t per_sample) {
  SampleFormat format{type, samples, per_sample};
  format.histogram[0] = samples * 40 / 100;
  format.histogram[1] = samples * 35 / 100;
  format.histogram[3] = samples * 20 / 100;
  format.histogram[6] = samples - format.histogram[0] - format.histogram[1] - format.histogram[3];
  return format;
}

SampleFormat one_width(ElementType type, std::int64_t samples, std::int64_t per_sample,
                       std::size_t width) {
  SampleFormat format{type, samples, per_sample};
  format.histogram[width] = samples;
  return format;
}

std::string describe(const SampleFormat& format) {
  return std::to_string(format.samples) + " x " + std::to_string(format.per_sample) + " " +
         name_of(format.type);
}

Bytes packed_samples(const SampleFormat& format, std::span<const std::byte> source,
                     const std::vector<float>& weights, const Key& key, const Place& place,
                     std::size_t offset = 0) {
  Memory on_backend(place.execution.backend, weights.size() * sizeof(float));
  on_backend.write(bytes_of(weights));
  const auto* pointer = weights.empty() ? nullptr : static_cast<const float*>(on_backend.data());
  return packed_by(format, source, place, offset,
                   [&](const void* from, Payload payload, const Execution& where) {
                     return pack(format, from, pointer, key, payload, where);
                   });
}

template <typename T>
std::vector<T> table(const Bytes& payload, std::size_t offset, std::int64_t samples) {
  std::vector<T> values(static_cast<std::size_t>(samples));
  std::memcpy(values.data(), payload.data() + offset, values.size() * sizeof(T));
  return values;
}
std::vector<std::uint32_t> slots_of(const Bytes& payload, std::int64_t samples) {
  return table<std::uint32_t>(payload, 0, samples);
}
std::vector<float> scores_of(const Bytes& payload, const SampleFormat& format) {
  return table<float>(payload, scores_offset(format), format.samples);
}

// Normal numbers; those of sample n are scaled by scale[n mod size].
Elements scaled_samples(const SampleFormat& format, const std::vector<double>& scale) {
  const auto count = format.samples * format.per_sample;
  auto numbers = make_elements(Kind::kNormal, ElementType::kF64, count, false).numbers();
  for (std::size_t i = 0; i < numbers.size(); ++i)
    numbers[i] *= scale[i / static_cast<std::size_t>(format.per_sample) % scale.size()];
  return elements_of(format.type, numbers);
}

void expect_agreement(const SampleFormat& format, Kind kind, const std::vector<float>& weights,
                      std::size_t offset) {
  const Elements source =
      make_elements(kind, format.type, format.samples * format.per_sample, false);
  const Key key{.seed = 7, .stream = static_cast<std::uint64_t>(format.per_sample)};
  const Bytes payload = packed_samples(format, source.bytes, weights, key, reference());
  const Bytes elements = unpacked(format, payload, reference());
  const std::size_t past = offset * size_of(format.type);
  for (const Place& place : places()) {
    SCOPED_TRACE(describe(format) + ", " + name_of(kind) + ", on " + place.name);
    ASSERT_TRUE(packed_samples(format, source.bytes, weights, key, place, past) == payload);
    ASSERT_TRUE(unpacked(format, payload, place, past) == elements);
  }
}

std::vector<float> some_weights(std::int64_t samples) {
  std::vector<float> weights(static_cast<std::size_t>(samples));
  for (std::size_t i = 0; i < weights.size(); ++i)
    weights[i] = std::exp2(static_cast<float>(static_cast<int>(i * 7 % 11) - 5));
  return weights;
}

// Payloads are compared whole, padding included. Another order of sums changes a score's last bit
// in the first shapes of more than four groups; a random number by slot instead of sample, all.
TEST(Samples, AgreeOnEveryBackendInOddShapes) {
  for (const ElementType type : kFloatTypes) {
    for (const std::int64_t per_sample : {1, 2, 31, 100, 127, 128, 129, 257, 1'024, 1'025})
      for (const std::int64_t samples : {1, 2, 7, 33})
        ASSERT_NO_FATAL_FAILURE(expect_agreement(mixed_format(type, samples, per_sample),
                                                 Kind::kHeavyTailed, some_weights(samples),
                                                 static_cast<std::size_t>(per_sample % 3)));
    for (const auto& [samples, per_sample] :
         {std::pair{300, 129}, {129, 5}, {5, 4'224}, {3, 9'001}})
      ASSERT_NO_FATAL_FAILURE(
          expect_agreement(mixed_format(type, samples, per_sample), Kind::kNormal, {}, 0));
  }
}

TEST(Samples, AgreeForEverySizeUpTo1025) {
  for (std::int64_t per_sample = 1; per_sample <= 1'025; per_sample += per_sample < 300 ? 1 : 29)
    ASSERT_NO_FATAL_FAILURE(expect_agreement(
        mixed_format(per_sample % 2 == 0 ? ElementType::kF32 : ElementType::kBF16, 3, per_sample),
        Kind::kHeavyTailed, {}, static_cast<std::size_t>(per_sample % 5)));
}

// Several thread blocks rank here, each over several tiles; three threads have work.
TEST(Samples, AgreeForManySamples) {
  for (const auto& [samples, per_sample] : {std::pair{2'500, 40}, {1'100, 260}, {300, 4'200}})
    ASSERT_NO_FATAL_FAILURE(expect_agreement(mixed_format(ElementType::kF32, samples, per_sample),
                                             Kind::kNormal, some_weights(samples), 0));
  // Ties of all with all.
  ASSERT_NO_FATAL_FAILURE(
      expect_agreement(mixed_format(ElementType::kF32, 1'500, 3), Kind::kConstant, {}, 0));
}

// Every width in one tensor, in every kind of data: constants, huge numbers, NaN, infinities.
TEST(Samples, AgreeForEveryKindOfData) {
  for (const ElementType type : kFloatTypes) {
    SampleFormat format{type, 11, 300, {1, 1, 1, 1, 2, 2, 2, 1}};
    if (size_of(type) == 2) format.histogram = {2, 1, 1, 1, 2, 2, 2, 0};
    for (const Kind kind : kAllKinds)
      ASSERT_NO_FATAL_FAILURE(expect_agreement(format, kind, {}, 0));
  }
}

// A decoder's view: a section is a payload of the group quantizer, and its samples hold the headers
// and codes that they would have as part of one tensor at that width.
TEST(Samples, HaveTheGroupQuantizersBytes) {
  const std::int64_t samples = 5, groups = 3;
  const Key key{.seed = 3, .stream = 4};
  for (std::size_t width = 0; width < kSampleWidths.size(); ++width) {
    const SampleFormat format = one_width(ElementType::kF32, samples, groups * 128, width);
    const GroupFormat flat{.bits = kSampleWidths[width], .count = samples * groups * 128};
    const Elements source = scaled_samples(format, {3, 1, 4, 1.5, 9});
    const Bytes payload = packed_samples(format, source.bytes, {}, key, reference());
    const Bytes expected = packed(flat, source.bytes, key, reference());
    const std::size_t body = 48, headers = 64;  // 40 bytes of table, 15 headers, both padded
    ASSERT_EQ(payload.size(), body + expected.size());
    const auto slots = slots_of(payload, samples);
    EXPECT_EQ(slots, (std::vector<std::uint32_t>{2, 0, 3, 1, 4}));
    const auto code_bytes = static_cast<std::size_t>(groups * 16 * kSampleWidths[width]);
    for (std::size_t i = 0; i < slots.size(); ++i) {
      const auto same = [&](std::size_t start, std::size_t bytes) {
        return std::memcmp(payload.data() + body + start + slots[i] * bytes,
                           expected.data() + start + i * bytes, bytes) == 0;
      };
      EXPECT_TRUE(same(0, groups * 4)) << "headers of sample " << i;
      EXPECT_TRUE(same(headers, code_bytes)) << "codes of sample " << i;
    }
  }
}

// The example of docs/formats.md. The codes are exact, so no key changes them.
TEST(Samples, HaveTheBytesOfTheDocumentsExample) {
  const std::vector<float> source = {0, 1, 0, 1, -3, -1, 1, 3, 5, 5, 5, 5};
  const SampleFormat format{ElementType::kF32, 3, 4, {2, 1}};
  std::vector<unsigned char> expected(128);
  const auto put = [&](std::size_t at, std::initializer_list<unsigned char> bytes) {
    std::copy(bytes.begin(), bytes.end(), expected.begin() + static_cast<std::ptrdiff_t>(at));
  };
  put(0, {1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0});
  put(12, {0, 0, 0x80, 0x3f, 0, 0, 0x10, 0x42, 0, 0, 0, 0});
  put(32, {0, 0, 0x80, 0x7f, 0, 0, 0x80, 0x3f});
  put(48, {0, 0, 0, 0, 0, 0, 0x14, 0x40});
  put(64, {0x10, 0x10});
  put(80, {0xa0, 0xff, 0x00, 0x40});
  put(96, {0, 1, 2, 3});
  EXPECT_EQ(scores_offset(format), 12u);
  for (const Place& place : places())
    EXPECT_TRUE(std::ranges::equal(packed_samples(format, bytes_of(source), {}, {}, place),
                                   std::as_bytes(std::span(expected))))
        << place.name;
}

TEST(Samples, HaveTheScoreOfTheirRanges) {
  const SampleFormat format = mixed_format(ElementType::kBF16, 6, 5'000);
  const Elements source = scaled_samples(format, {1, 10, 100});
  const auto numbers = source.numbers();
  const Bytes payload = packed_samples(format, source.bytes, {}, {}, reference());
  const auto scores = scores_of(payload, format);
  for (std::size_t sample = 0; sample < 6; ++sample) {
    double expected = 0;
    for (std::size_t at = 0; at < 5'000; at += 128) {
      const auto first = numbers.begin() + static_cast<std::ptrdiff_t>(sample * 5'000 + at);
      const auto [low, high] = std::minmax_element(
          first, first + static_cast<std::ptrdiff_t>(std::min<std::size_t>(128, 5'000 - at)));
      expected += (*high - *low) * (*high - *low);
    }
    EXPECT_NEAR(scores[sample] / expected, 1.0, 1e-6);
  }
  // 1:40%, 2:35%, 4:20%, 8:rest of 6 samples are 2, 2, 1, 1: the two largest have the last slots.
  const auto slots = slots_of(payload, 6);
  EXPECT_EQ(slots[2] + slots[5], 4u + 5u);
  EXPECT_EQ(slots[0] + slots[3], 0u + 1u);
}

std::vector<std::uint32_t> slots_for(const std::vector<float>& ranges,
                                     const std::vector<float>& weights) {
  // Two elements make a sample whose range is known.
  std::vector<float> source;
  for (const float range : ranges) source.insert(source.end(), {0.0f, range});
  const auto samples = static_cast<std::int64_t>(ranges.size());
  const SampleFormat format = mixed_format(ElementType::kF32, samples, 2);
  std::vector<std::uint32_t> first;
  for (const Place& place : places()) {
    const auto slots =
        slots_of(packed_samples(format, bytes_of(source), weights, {}, place), samples);
    if (first.empty()) first = slots;
    EXPECT_EQ(slots, first) << place.name;
  }
  return first;
}

TEST(Samples, AreRankedByWeightedScore) {
  using Slots = std::vector<std::uint32_t>;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(slots_for({3, 1, 2}, {}), (Slots{2, 0, 1}));
  EXPECT_EQ(slots_for({3, 1, 2}, {1, 100, 1}), (Slots{1, 2, 0}));
  EXPECT_EQ(slots_for({3, 1, 2}, {-1, 0, -2}), (Slots{0, 2, 1}));
  // Ties: the lower index comes first.
  EXPECT_EQ(slots_for({1, 1, 1, 1}, {}), (Slots{3, 2, 1, 0}));
  EXPECT_EQ(slots_for({1, 2, 1, 2}, {4, 1, 4, 1}), (Slots{3, 2, 1, 0}));
  EXPECT_EQ(slots_for({0, 1e-20f, 1e-18f}, {1, 1, 1e-30f}), (Slots{2, 1, 0}));
  // Non-finite scores come first, and are all equal.
  EXPECT_EQ(slots_for({5, nan, 9, kInfinity}, {}), (Slots{0, 3, 1, 2}));
  EXPECT_EQ(slots_for({5, 2, 9}, {1, nan, 1}), (Slots{0, 2, 1}));
  EXPECT_EQ(slots_for({5, kInfinity, 9}, {1, 0, 1}), (Slots{0, 2, 1}));
  EXPECT_EQ(slots_for({1e25f, 2, 9}, {0.5f, 1, 1}), (Slots{2, 0, 1}));
}

// NaN moves its sample to the widest codes and stays there; with one width for all, the others'
// elements do not change at all.
TEST(Samples, WithNanLeaveTheOthersAlone) {
  const SampleFormat format = one_width(ElementType::kF32, 4, 200, 3);
  const Elements clean = scaled_samples(format, {1, 2, 3, 4});
  Elements spoilt = clean;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::memcpy(spoilt.bytes.data() + (200 + 17) * sizeof(float), &nan, sizeof(nan));
  const Bytes before = packed_samples(format, clean.bytes, {}, {}, reference());
  const Bytes after = packed_samples(format, spoilt.bytes, {}, {}, reference());
  EXPECT_EQ(slots_of(after, 4), (std::vector<std::uint32_t>{0, 3, 1, 2}));
  EXPECT_EQ(scores_of(after, format)[1], kInfinity);
  const Bytes expected = unpacked(format, before, reference());
  const Bytes found = unpacked(format, after, reference());
  for (const std::size_t sample : {0, 2, 3})
    EXPECT_EQ(std::memcmp(expected.data() + sample * 800, found.data() + sample * 800, 800), 0);
  float element;
  std::memcpy(&element, found.data() + 217 * sizeof(float), sizeof(element));
  EXPECT_TRUE(std::isnan(element));
}

TEST(Samples, DecodeWithAnySlots) {
  const SampleFormat format = mixed_format(ElementType::kF16, 9, 150);
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    const Bytes payload = noise(packed_bytes(format), seed);
    const Bytes expected = unpacked(format, payload, reference());
    for (const Place& place : places())
      EXPECT_TRUE(unpacked(format, payload, place) == expected) << place.name;
  }
}

TEST(Samples, DecodeToTheSourceOnAverageWithTheErrorOfTheModel) {
  constexpr int kDraws = 1'024;
  const SampleFormat format = mixed_format(ElementType::kF32, 8, 300);
  const Elements source = scaled_samples(format, {1, 5, 0.2, 30});
  const auto numbers = source.numbers();
  std::vector<double> sum(numbers.size()), squares(numbers.size());
  std::vector<float> decoded(numbers.size());
  Memory payload(Backend::kCpu, packed_bytes(format));
  const Payload room{payload.data(), payload.bytes()};
  for (int draw = 0; draw < kDraws; ++draw) {
    const Key key{.seed = 1, .stream = static_cast<std::uint64_t>(draw)};
    ASSERT_TRUE(pack(format, source.bytes.data(), nullptr, key, room, {}).ok());
    ASSERT_TRUE(unpack(format, room, decoded.data(), {}).ok());
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      const double error = decoded[i] - numbers[i];
      sum[i] += error;
      squares[i] += error * error;
    }
  }
  double worst = 0;
  const auto slots = slots_of(payload.read(), 8);
  for (std::size_t sample = 0; sample < 8; ++sample) {
    const int bits = slots[sample] < 3 ? 1 : slots[sample] < 5 ? 2 : slots[sample] < 6 ? 4 : 8;
    const auto first = numbers.begin() + static_cast<std::ptrdiff_t>(sample * 300);
    const auto [low, high] = std::minmax_element(first, first + 300);
    // An element close to a code may not have left it in these draws: count one that did.
    const double one_step = (*high - *low) / ((1 << bits) - 1) / kDraws;
    for (std::size_t i = sample * 300; i < (sample + 1) * 300; ++i) {
      const double mean = sum[i] / kDraws;
      const double variance = std::max(0.0, squares[i] / kDraws - mean * mean);
      worst = std::max(worst, std::fabs(mean) / (std::sqrt(variance / kDraws) + one_step));
    }
  }
  EXPECT_LT(worst, 6.0);  // rounding to nearest: above 100
  double expected = 0;
  ASSERT_TRUE(expected_squared_error(format, source.bytes.data(), nullptr, &expected).ok());
  const double found = std::accumulate(squares.begin(), squares.end(), 0.0) / kDraws;
  EXPECT_NEAR(found / expected, 1.0, 0.03);  // the widths the wrong way round: above 100
}

// The point of it: 8 samples each of ranges 1, 10, 100, 1,000. At the bytes of 3 bits everywhere,
// 6, 4, 1 and 1 bits leave about a fiftieth of the error.
TEST(Samples, OfDifferentRangesLoseFarLessAtEqualBytes) {
  const SampleFormat even = one_width(ElementType::kF32, 32, 1'024, 2);
  SampleFormat mixed = even;
  mixed.histogram = {16, 0, 0, 8, 0, 8, 0, 0};
  ASSERT_EQ(packed_bytes(mixed), packed_bytes(even));
  const Elements source = scaled_samples(even, {1, 1'000, 10, 100});
  double error_even = 0, error_mixed = 0;
  ASSERT_TRUE(expected_squared_error(even, source.bytes.data(), nullptr, &error_even).ok());
  ASSERT_TRUE(expected_squared_error(mixed, source.bytes.data(), nullptr, &error_mixed).ok());
  EXPECT_GT(error_even / error_mixed, 40);
  EXPECT_LT(error_even / error_mixed, 60);
  const Bytes payload = packed_samples(mixed, source.bytes, {}, {1, 2}, places().back());
  const Bytes decoded = unpacked(mixed, payload, places().back());
  const auto found = Elements{mixed.type, decoded}.numbers(), numbers = source.numbers();
  double error = 0;
  for (std::size_t i = 0; i < numbers.size(); ++i)
    error += (found[i] - numbers[i]) * (found[i] - numbers[i]);
  EXPECT_NEAR(error / error_mixed, 1.0, 0.1);
}

TEST(Samples, BadInputIsRefusedByNameAndNothingIsWritten) {
  const auto invalid = StatusCode::kInvalidArgument;
  const SampleFormat good{ElementType::kBF16, 4, 100, {2, 0, 0, 2}};
  const std::pair<SampleFormat, std::string_view> cases[] = {
      {{ElementType::kI64, 4, 100, {4}}, "type must be fp32, fp16, bf16 or fp64, got int64 (4)"},
      {{ElementType::kF32, -1, 100, {}}, "samples must be between 0 and 16384, got -1"},
      {{ElementType::kF32, 16'385, 1, {16'385}}, "samples must be between 0 and 16384, got 16385"},
      {{ElementType::kF32, 4, -5, {4}},
       "per_sample must be between 0 and 70368744177664 for 4 samples, got -5"},
      {{ElementType::kF32, 4, 70'368'744'177'665, {4}},
       "per_sample must be between 0 and 70368744177664 for 4 samples, got 70368744177665"},
      {{ElementType::kF32, 4, 100, {5, -1}},
       "histogram must be between 0 and samples 4, got 5 of width 1"},
      {{ElementType::kF32, 4, 100, {4, 0, -2}},
       "histogram must be between 0 and samples 4, got -2 of width 3"},
      {{ElementType::kF32, 4, 100, {1, 2}}, "histogram must sum to samples 4, got 3"},
      {{ElementType::kF32, 4, 100, {3, 3}}, "histogram must sum to samples 4, got 6"},
      {{ElementType::kF16, 4, 100, {3, 0, 0, 0, 0, 0, 0, 1}},
       "histogram must be 0 for widths that the source has, got 1 of width 16 for fp16: a packet "
       "would not be smaller than its source"}};
  for (const Place& place : places()) {
    const Execution& where = place.execution;
    Memory source(where.backend, 800), payload(where.backend, packed_bytes(good));
    Memory result(where.backend, 800), weights(where.backend, 16);
    source.write(Bytes(800, std::byte{0}));
    weights.write(Bytes(16, std::byte{0}));
    const Bytes before = payload.read(), result_before = result.read();
    const Payload room = {payload.data(), payload.bytes()};
    for (const auto& [format, words] : cases) {
      EXPECT_EQ(validate(format).message(), words);
      expect_error(pack(format, source.data(), nullptr, {}, room, where), invalid, words);
      expect_error(unpack(format, room, result.data(), where), invalid, words);
      EXPECT_EQ(packed_bytes(format), 0u);
      EXPECT_EQ(scores_offset(format), 0u);
    }
    const auto* astray = reinterpret_cast<float*>(static_cast<char*>(weights.data()) + 2);
    expect_error(pack(good, nullptr, nullptr, {}, room, where), invalid, "source");
    expect_error(pack(good, source.data(), astray, {}, room, where), invalid,
                 "weights must be aligned");
    expect_error(pack(good, source.data(), nullptr, {}, {nullptr, room.bytes}, where), invalid,
                 "payload");
    expect_error(pack(good, source.data(), nullptr, {}, {room.data, room.bytes - 1}, where),
                 StatusCode::kShortPayload, "payload must hold 224 bytes, got 223");
    expect_error(unpack(good, room, nullptr, where), invalid, "destination");
    EXPECT_EQ(payload.read(), before);
    EXPECT_EQ(result.read(), result_before);
  }
  double error = 0;
  expect_error(expected_squared_error(good, nullptr, nullptr, &error), invalid, "source");
}

TEST(Samples, WithoutElementsTakeNoBytesAndNoBuffers) {
  for (const SampleFormat& format : {SampleFormat{}, one_width(ElementType::kF32, 5, 0, 2),
                                     one_width(ElementType::kF32, 0, 9, 2)}) {
    EXPECT_EQ(packed_bytes(format), 0u);
    double error = 1;
    EXPECT_TRUE(expected_squared_error(format, nullptr, nullptr, &error).ok());
    EXPECT_EQ(error, 0.0);
    for (const Place& place : places()) {
      EXPECT_TRUE(pack(format, nullptr, nullptr, {}, {}, place.execution).ok());
      EXPECT_TRUE(unpack(format, {}, nullptr, place.execution).ok());
    }
  }
}

}  // namespace
}  // namespace backfold::testing
