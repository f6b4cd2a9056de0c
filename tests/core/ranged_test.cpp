// SPDX-License-Identifier: Apache-2.0

#include "backfold/ranged.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "core/group_data.h"
#include "core/support.h"

namespace backfold::testing {
namespace {

using Ranges = std::vector<float>;

constexpr float kInf = INFINITY;
constexpr int kBits[] = {2, 4, 8};

std::string text_of(const RangedFormat& format) {
  return std::string(backfold::name_of(format.type)) + " " + std::to_string(format.bits) +
         " bits, " + std::to_string(format.outer) + " x " + std::to_string(format.channels) +
         " x " + std::to_string(format.inner);
}

std::int64_t count_of(const RangedFormat& format) {
  return format.outer * format.channels * format.inner;
}

Bytes packed_in(const RangedFormat& format, std::span<const std::byte> source, const Ranges& ranges,
                const Key& key, const Place& place, std::size_t offset = 0) {
  Memory given(place.execution.backend, ranges.size() * sizeof(float), 4);
  given.write(bytes_of(ranges));
  return packed_by(format, source, place, offset,
                   [&](const void* from, Payload payload, const Execution& where) {
                     return pack(format, from, static_cast<const float*>(given.data()), key,
                                 payload, where);
                   });
}

Ranges widened_in(const RangedFormat& format, std::span<const std::byte> source,
                  const Ranges& ranges, const Place& place, bool in_place, std::size_t offset = 0) {
  const Backend backend = place.execution.backend;
  Memory input(backend, source.size(), offset);
  Memory given(backend, ranges.size() * sizeof(float), 4);
  Memory result(backend, ranges.size() * sizeof(float), 4);
  input.write(source);
  given.write(bytes_of(ranges));
  const Memory& to = in_place ? given : result;
  const Status status = widen(format, input.data(), static_cast<const float*>(given.data()),
                              static_cast<float*>(to.data()), place.execution);
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_TRUE(given.guards_intact() && result.guards_intact()) << "written out of bounds";
  Ranges found(ranges.size());
  const Bytes bytes = to.read();
  if (!bytes.empty()) std::memcpy(found.data(), bytes.data(), bytes.size());
  return found;
}

// Bit for bit: -0 is not +0.
bool same(const Ranges& a, const Ranges& b) { return std::ranges::equal(bytes_of(a), bytes_of(b)); }

// As fp32, the way every codec reads fp64.
float number_of(double value) {
  if (std::isfinite(value))
    value = std::clamp<double>(value, -3.4028234663852886e38, 3.4028234663852886e38);
  return static_cast<float>(value);
}

Ranges plainly_widened(const RangedFormat& format, const Elements& source, Ranges ranges) {
  const auto below = [](float a, float b) {
    return a < b || (a == b && std::signbit(a) && !std::signbit(b));
  };
  for (std::size_t c = 0; c < ranges.size(); c += 2) {
    if (std::isnan(ranges[c])) ranges[c] = kInf;
    if (std::isnan(ranges[c + 1])) ranges[c + 1] = -kInf;
  }
  for (std::int64_t i = 0; i < count_of(format); ++i) {
    const float value = number_of(source.at(i));
    if (!std::isfinite(value)) continue;
    const auto c = static_cast<std::size_t>(i / format.inner % format.channels);
    if (below(value, ranges[2 * c])) ranges[2 * c] = value;
    if (below(ranges[2 * c + 1], value)) ranges[2 * c + 1] = value;
  }
  return ranges;
}

// Ranges like running estimates: close to the data, too narrow for some of it. A few are odd.
Ranges some_ranges(std::int64_t channels, bool odd) {
  constexpr float kOdd[][2] = {{0.5f, 0.5f},    {kInf, -kInf}, {NAN, 1.0f},    {2.0f, 1.0f},
                               {-3e38f, 3e38f}, {1.0f, kInf},  {0.0f, 1e-40f}, {-0.0f, 0.0f}};
  Random random(static_cast<std::uint64_t>(channels));
  Ranges ranges;
  for (std::int64_t c = 0; c < channels; ++c) {
    const float shift = static_cast<float>(random.below(100)) * 0.01f;
    const std::size_t which = random.below(24);
    ranges.push_back(odd && which < 8 ? kOdd[which][0] : -1.0f - shift);
    ranges.push_back(odd && which < 8 ? kOdd[which][1] : 2.0f - shift);
  }
  return ranges;
}

const std::int64_t kShapes[][3] = {
    {1, 1, 0},      {0, 3, 7},     {2, 0, 5},      {1, 1, 1},     {1, 1, 1'025},  {1, 7, 1},
    {3, 5, 1},      {131, 3, 1},   {77, 13, 1},    {40, 64, 1},   {3, 4, 7},      {9, 11, 49},
    {2, 3, 300},    {5, 2, 128},   {1, 2, 4'097},  {3, 1, 8'191}, {1'000, 24, 1}, {64, 8, 196},
    {2, 3, 40'000}, {300, 768, 1}, {1, 1, 200'003}};

TEST(Ranged, EveryBackendGivesTheSameBytesAndElements) {
  for (const ElementType type : kFloatTypes) {
    for (const int bits : kBits) {
      for (const auto& [outer, channels, inner] : kShapes) {
        const RangedFormat format = {type, bits, outer, channels, inner};
        const std::int64_t count = count_of(format);
        // Large ones, which break shares of threads and tiles, at one width of each type.
        if (count > 20'000 && bits != (size_of(type) == 2 ? 2 : 8)) continue;
        const bool odd = count % 2 == 0;
        const Elements source = make_elements(odd ? Kind::kNan : Kind::kHeavyTailed, type, count,
                                              false, static_cast<std::uint64_t>(inner + 1));
        const Ranges ranges = some_ranges(channels, odd);
        const Key key = {3, static_cast<std::uint64_t>(count)};
        const Bytes payload = packed_in(format, source.bytes, ranges, key, reference());
        const Bytes elements = unpacked(format, payload, reference());
        for (const Place& place : places()) {
          for (const std::size_t offset : {std::size_t{0}, size_of(type)}) {
            ASSERT_TRUE(packed_in(format, source.bytes, ranges, key, place, offset) == payload)
                << place.name << ", " << text_of(format);
            ASSERT_TRUE(unpacked(format, payload, place, offset) == elements)
                << place.name << ", " << text_of(format);
          }
        }
      }
    }
  }
}

TEST(Ranged, EverySizeUpToAThousandComesBackAlike) {
  for (const int bits : kBits) {
    const Elements source = make_elements(Kind::kNormal, ElementType::kBF16, 1'025, false);
    for (std::int64_t size = bits; size <= 1'025; size += bits == 4 ? 1 : 3) {
      const RangedFormat format = {ElementType::kBF16, bits, 1, 1, size};
      const auto elements = std::span(source.bytes).first(static_cast<std::size_t>(size) * 2);
      const Bytes payload = packed_in(format, elements, {-1, 2}, {5, 6}, reference());
      const Bytes result = unpacked(format, payload, reference());
      for (const Place& place : places()) {
        ASSERT_TRUE(packed_in(format, elements, {-1, 2}, {5, 6}, place) == payload)
            << place.name << ", " << text_of(format);
        ASSERT_TRUE(unpacked(format, payload, place) == result)
            << place.name << ", " << text_of(format);
      }
    }
  }
}

TEST(Ranged, BytesAreThoseOfTheHeader) {
  // Two channels of integers that the grids hold, so that no draw changes them.
  const RangedFormat format = {ElementType::kF32, 4, 3, 2, 3};
  const std::vector<float> source = {0, 1, 15, -4, -2, 26, 2, 3, 4, 0, 2, 4, 5, 6, 7, 6, 8, 10};
  const Bytes payload = packed_in(format, bytes_of(source), {0, 15, -4, 26}, {1, 2}, reference());
  const float headers[] = {0, 1, -4, 2};
  // Codes 0 1 15 | 0 1 15 | 2 3 4 | 2 3 4 | 5 6 7 | 5 6 7.
  const std::uint8_t codes[] = {0x10, 0x0f, 0xf1, 0x32, 0x24, 0x43, 0x65, 0x57, 0x76};
  ASSERT_EQ(payload.size(), 32u);
  EXPECT_EQ(std::memcmp(payload.data(), headers, 16), 0);
  EXPECT_EQ(std::memcmp(payload.data() + 16, codes, sizeof(codes)), 0);
  for (std::size_t i = 16 + sizeof(codes); i < 32; ++i) EXPECT_EQ(payload[i], std::byte{0});
  for (const Place& place : places())
    EXPECT_TRUE(std::ranges::equal(unpacked(format, payload, place), bytes_of(source)));
}

TEST(Ranged, WidenFindsTheBoundsOfAPlainLoop) {
  for (const ElementType type : kFloatTypes) {
    for (const auto& [outer, channels, inner] : kShapes) {
      const RangedFormat format = {type, 8, outer, channels, inner};
      const std::int64_t count = count_of(format);
      for (const Kind kind : {Kind::kHeavyTailed, Kind::kMixedKinds, Kind::kMixedZeros, Kind::kHuge,
                              Kind::kDenormals}) {
        if (count > 20'000 && kind != Kind::kMixedKinds) continue;
        const Elements source = make_elements(kind, type, count, false);
        Ranges ranges = some_ranges(channels, true);
        if (kind != Kind::kHeavyTailed)
          for (std::size_t i = 0; i < ranges.size(); ++i) ranges[i] = i % 2 == 0 ? kInf : -kInf;
        const Ranges expected = plainly_widened(format, source, ranges);
        for (const Place& place : places()) {
          const bool in_place = place.name.size() % 2 == 0;
          for (const std::size_t offset : {std::size_t{0}, size_of(type)})
            ASSERT_TRUE(
                same(widened_in(format, source.bytes, ranges, place, in_place, offset), expected))
                << place.name << ", " << text_of(format) << ", " << name_of(kind);
        }
      }
    }
  }
}

TEST(Ranged, DecodesToTheSourceOnAverageWithTheErrorOfTheModel) {
  constexpr int kDraws = 1'024;
  for (const int bits : kBits) {
    for (const std::int64_t inner : {std::int64_t{1}, std::int64_t{40}}) {
      const RangedFormat format = {ElementType::kF32, bits, 280 / inner, 3, inner};
      const Elements source = make_elements(Kind::kNormal, format.type, 840, false);
      const std::vector<double> numbers = source.numbers();
      const Ranges ranges =
          widened_in(format, source.bytes, {-1, 1, 0, 7, -5, 0}, reference(), false);
      double expected = 0;
      ASSERT_TRUE(
          expected_squared_error(format, source.bytes.data(), ranges.data(), &expected).ok());
      for (const Execution& execution : {reference().execution, Execution{}}) {
        std::vector<double> sum(numbers.size()), squares(numbers.size());
        double total = 0, worst = 0, whole = 0, whole_squares = 0;
        for (std::uint64_t seed = 0; seed < kDraws; ++seed) {
          const Bytes payload = packed_in(format, source.bytes, ranges, {seed, 9}, {"", execution});
          const Elements result = {format.type, unpacked(format, payload, {"", execution})};
          double drawn = 0;
          for (std::size_t i = 0; i < numbers.size(); ++i) {
            const double error = result.at(static_cast<std::int64_t>(i)) - numbers[i];
            sum[i] += error, squares[i] += error * error, drawn += error;
          }
          whole += drawn, whole_squares += drawn * drawn;
        }
        for (std::size_t i = 0; i < numbers.size(); ++i) {
          total += squares[i];
          // fp32 rounding of the range, 2^-22 of 12, is no bias that counts.
          const double bias = std::max(0.0, std::fabs(sum[i]) / kDraws - 3e-6);
          const std::size_t c = i / static_cast<std::size_t>(inner) % 3;
          const double low = ranges[2 * c], high = ranges[2 * c + 1];
          const double step = (high - low) / ((1 << bits) - 1), place = (numbers[i] - low) / step;
          const double p = place - std::floor(place);
          // One draw more or less, for elements so near a code that few draws leave it.
          worst = std::max(worst, bias / (step * (std::sqrt(p * (1 - p) / kDraws) + 1.0 / kDraws)));
        }
        EXPECT_LT(worst, 5.5) << text_of(format);  // rounding to nearest: 30
        EXPECT_LT(std::fabs(whole) / std::sqrt(whole_squares), 5.0) << text_of(format);
        EXPECT_NEAR(total / kDraws / expected, 1.0, 0.1) << text_of(format);  // to nearest: 0.5
        // Errors that add up, as those of one random number for eight elements do, score 8.
        EXPECT_NEAR(whole_squares / total, 1.0, 0.25) << text_of(format);
      }
    }
  }
}

TEST(Ranged, ClampsWhatIsOutsideAndSaysWhatThatCosts) {
  const RangedFormat format = {ElementType::kF32, 2, 1, 2, 4};
  const std::vector<float> source = {-7, 0, 3, 11, 1e30f, 5, 5.5f, -1e30f};
  const Ranges ranges = {0, 3, 5, 5};
  const std::vector<float> clamped = {0, 0, 3, 3, 5, 5, 5, 5};
  for (const Place& place : places()) {
    const Bytes payload = packed_in(format, bytes_of(source), ranges, {1, 2}, place);
    EXPECT_TRUE(std::ranges::equal(unpacked(format, payload, place), bytes_of(clamped)))
        << place.name;
  }
  double error = 0, expected = 0;
  ASSERT_TRUE(expected_squared_error(format, source.data(), ranges.data(), &error).ok());
  for (std::size_t i = 0; i < source.size(); ++i) {
    const double off = static_cast<double>(source[i]) - static_cast<double>(clamped[i]);
    expected += off * off;
  }
  EXPECT_NEAR(error / expected, 1.0, 1e-12);
}

// Channels: finite; NaN; +inf; an upside-down range; an infinite bound; nothing finite.
TEST(Ranged, AChannelThatHoldsSomethingNotFiniteDecodesToNan) {
  for (const ElementType type : kFloatTypes) {
    for (const int bits : kBits) {
      const RangedFormat format = {type, bits, 200, 6, 1};
      std::vector<double> numbers(1'200, 0.25);
      numbers[6 * 199 + 1] = NAN;
      numbers[6 * 77 + 2] = INFINITY;
      for (std::size_t row = 0; row < 200; ++row) numbers[6 * row + 5] = -INFINITY;
      const Elements source = elements_of(type, numbers);
      const Ranges ranges = {0.25f, 0.25f, 0, 1, 0, 1, 2, 1, 0, kInf, kInf, -kInf};
      for (const Place& place : places()) {
        const Elements result = {
            type, unpacked(format, packed_in(format, source.bytes, ranges, {1, 2}, place), place)};
        for (std::int64_t i = 0; i < 1'200; ++i) {
          if (i % 6 == 0)
            ASSERT_EQ(result.at(i), 0.25) << place.name;
          else
            ASSERT_TRUE(std::isnan(result.at(i))) << place.name << ", channel " << i % 6;
        }
      }
      double error = -1;
      ASSERT_TRUE(expected_squared_error(format, source.bytes.data(), ranges.data(), &error).ok());
      EXPECT_EQ(error, 0.0);
    }
  }
}

TEST(Ranged, FiniteElementsStayFiniteAtTheEndsOfTheirType) {
  for (const ElementType type : kFloatTypes) {
    const RangedFormat format = {type, 4, 9, 31, 1};
    const Elements source = make_elements(Kind::kHuge, type, 279, false);
    const Ranges ranges = widened_in(format, source.bytes, Ranges(62, NAN), reference(), false);
    for (const Place& place : places()) {
      const Elements result = {
          type, unpacked(format, packed_in(format, source.bytes, ranges, {1, 2}, place), place)};
      for (std::int64_t i = 0; i < 279; ++i) ASSERT_TRUE(std::isfinite(result.at(i)));
    }
  }
}

TEST(Ranged, ArbitraryBytesDecodeAlike) {
  for (const ElementType type : kFloatTypes) {
    for (const std::int64_t inner : {std::int64_t{1}, std::int64_t{9}, std::int64_t{2'000}}) {
      const RangedFormat format = {type, 2, 7, 16, inner};
      const Bytes payload = noise(packed_bytes(format), static_cast<std::uint64_t>(inner));
      const Bytes expected = unpacked(format, payload, reference());
      for (const Place& place : places())
        EXPECT_TRUE(unpacked(format, payload, place) == expected) << place.name;
    }
  }
}

TEST(Ranged, BadInputIsRefusedByNameAndNothingIsWritten) {
  const auto invalid = StatusCode::kInvalidArgument;
  const auto f32 = ElementType::kF32;
  const RangedFormat good = {f32, 8, 2, 5, 10};
  const std::int64_t huge = std::int64_t{1} << 25;
  const std::pair<RangedFormat, std::string_view> cases[] = {
      {{ElementType::kI64, 8, 1, 1, 1}, "type must be fp32, fp16, bf16 or fp64, got int64 (4)"},
      {{f32, 3, 1, 1, 1}, "bits must be 2, 4 or 8, got 3"},
      {{f32, 8, -1, 1, 1}, "outer must be between 0 and 2^48, got -1"},
      {{f32, 8, 1, kMaxElements + 1, 1}, "channels must be between 0 and 2^48"},
      {{f32, 8, 1, 1, -9}, "inner must be between 0 and 2^48, got -9"},
      {{f32, 8, huge, huge, 1}, "outer x channels x inner must be at most 2^48 elements"},
      {{f32, 8, huge, 0, huge}, "got 33554432 x 0 x 33554432"}};
  for (const Place& place : places()) {
    const Execution& where = place.execution;
    Memory source(where.backend, 400), ranges(where.backend, 40), payload(where.backend, 160),
        result(where.backend, 400);
    const Bytes before = payload.read(), result_before = result.read();
    const Payload room = {payload.data(), 160};
    const float* given = static_cast<const float*>(ranges.data());
    float* wide = static_cast<float*>(result.data());
    for (const auto& [format, words] : cases) {
      expect_error(validate(format), invalid, words);
      expect_error(pack(format, source.data(), given, {}, room, where), invalid, words);
      expect_error(unpack(format, room, result.data(), where), invalid, words);
      expect_error(widen(format, source.data(), given, wide, where), invalid, words);
      EXPECT_EQ(packed_bytes(format), 0u);
    }
    const char* const astray = static_cast<const char*>(source.data()) + 2;
    expect_error(pack(good, nullptr, given, {}, room, where), invalid, "source must not be null");
    expect_error(pack(good, astray, given, {}, room, where), invalid, "source must be aligned");
    expect_error(pack(good, source.data(), nullptr, {}, room, where), invalid,
                 "ranges must not be null for 5 elements");
    expect_error(pack(good, source.data(), given, {}, {room.data, 159}, where),
                 StatusCode::kShortPayload, "payload must hold 160 bytes, got 159");
    expect_error(unpack(good, room, nullptr, where), invalid, "destination must not be null");
    expect_error(widen(good, nullptr, given, wide, where), invalid, "source must not be null");
    expect_error(widen(good, source.data(), nullptr, wide, where), invalid, "ranges must not");
    expect_error(widen(good, source.data(), given, nullptr, where), invalid, "widened must not");
    EXPECT_EQ(payload.read(), before);
    EXPECT_EQ(result.read(), result_before);
  }
  const float ranges[10] = {};
  const std::vector<float> source(100);
  expect_error(expected_squared_error(good, source.data(), ranges, nullptr), invalid,
               "error must not be null");
}

}  // namespace
}  // namespace backfold::testing
