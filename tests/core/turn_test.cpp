// SPDX-License-Identifier: Apache-2.0
//
// A key whose turn is read when the work runs: every codec that draws, on every backend.

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "backfold/group.h"
#include "backfold/pool.h"
#include "backfold/ranged.h"
#include "backfold/samples.h"
#include "backfold/signs.h"
#include "core/support.h"

namespace backfold::testing {
namespace {

constexpr std::int64_t kCount = 4'096;

std::vector<float> wave() {
  std::vector<float> values(kCount);
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = std::sin(0.37f * static_cast<float>(i)) + 1.01f;
  values[700] = INFINITY;  // its group leaves the fast path
  return values;
}

// What a codec makes of the wave.
struct Drawing {
  std::string name;
  std::function<Bytes(const Key& key, const Place& place)> bytes;
};

template <typename Format>
Drawing of_format(std::string name, const Format& format) {
  return {std::move(name), [format](const Key& key, const Place& place) {
            return packed(format, bytes_of(wave()), key, place);
          }};
}

std::vector<Drawing> drawings() {
  const GroupFormat flat{.bits = 4, .count = kCount};
  GroupFormat strided = flat, rotated = flat, zero_exact = flat;
  strided.layout = Layout::kStrided;
  strided.columns = 16;
  rotated.layout = Layout::kRotated;
  zero_exact.zero_exact = true;
  const PoolFormat pool{.block = 4, .bits = 2, .outer = 4, .height = 32, .width = 32};
  const RangedFormat ranged{.bits = 4, .outer = 8, .channels = 8, .inner = 64};
  SampleFormat samples{.samples = 16, .per_sample = kCount / 16};
  samples.histogram[3] = 16;
  return {
      of_format("flat", flat),
      of_format("strided", strided),
      of_format("rotated", rotated),
      of_format("zero-exact", zero_exact),
      of_format("pool", pool),
      {"ranged",
       [ranged](const Key& key, const Place& place) {
         std::vector<float> ranges;
         for (int i = 0; i < 8; ++i) ranges.insert(ranges.end(), {-0.1f, 2.1f});
         Memory given(place.execution.backend, ranges.size() * sizeof(float), 4);
         given.write(bytes_of(ranges));
         return packed_by(ranged, bytes_of(wave()), place, 0,
                          [&](const void* from, Payload payload, const Execution& where) {
                            return pack(ranged, from, static_cast<const float*>(given.data()), key,
                                        payload, where);
                          });
       }},
      {"samples",
       [samples](const Key& key, const Place& place) {
         return packed_by(samples, bytes_of(wave()), place, 0,
                          [&](const void* from, Payload payload, const Execution& where) {
                            return pack(samples, from, nullptr, key, payload, where);
                          });
       }},
      {"signs",
       [](const Key& key, const Place& place) {
         Memory memory(place.execution.backend, kCount * sizeof(float));
         EXPECT_TRUE(
             fill_signs(ElementType::kF32, 1.0f, kCount, key, memory.data(), place.execution).ok());
         return memory.read();
       }},
  };
}

Bytes in_turn(const Drawing& drawing, std::uint32_t turn, const Place& place) {
  Memory memory(place.execution.backend, sizeof turn);
  memory.write(std::as_bytes(std::span(&turn, 1)));
  return drawing.bytes({3, 4, static_cast<const std::uint32_t*>(memory.data())}, place);
}

TEST(Turns, OfZeroAreNone) {
  for (const Drawing& drawing : drawings())
    for (const Place& place : places())
      EXPECT_EQ(in_turn(drawing, 0, place), drawing.bytes({3, 4}, place))
          << drawing.name << ", " << place.name;
}

TEST(Turns, DrawTheSameNumbersOnEveryBackend) {
  for (const Drawing& drawing : drawings())
    for (const std::uint32_t turn : {1u, 0x9e37'79b1u, ~0u})
      for (const Place& place : places())
        EXPECT_EQ(in_turn(drawing, turn, place), in_turn(drawing, turn, reference()))
            << drawing.name << ", " << place.name << ", turn " << turn;
}

TEST(Turns, DrawOtherNumbersThanTheLast) {
  for (const Drawing& drawing : drawings()) {
    const Bytes first = in_turn(drawing, 1, reference()), second = in_turn(drawing, 2, reference());
    std::size_t same = 0;
    for (std::size_t i = 0; i < first.size(); ++i) same += first[i] == second[i];
    EXPECT_LT(same, first.size()) << drawing.name;
  }
}

TEST(Turns, AreNotCapturedOutsideOfAGraph) {
  for (const Place& place : places()) EXPECT_FALSE(is_captured(place.execution)) << place.name;
}

}  // namespace
}  // namespace backfold::testing
