// SPDX-License-Identifier: Apache-2.0
//
// Values that a grid alone would lose: constants, pairs, integers, infinities, NaN, the largest
// numbers.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/arithmetic.h"
#include "core/group_data.h"
#include "core/support.h"
#include "group/geometry.h"

namespace backfold::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Elements decoded(const GroupFormat& format, const Elements& source, const Key& key = {},
                 const Place& place = reference()) {
  const Bytes payload = packed(format, source.bytes, key, place);
  return {format.type, unpacked(format, payload, place)};
}

GroupFormat sized(GroupFormat format, std::int64_t count, std::int64_t columns = 1) {
  format.count = count;
  format.columns = format.layout == Layout::kStrided ? columns : 0;
  return format;
}

std::uint32_t header_of(const Bytes& payload, std::size_t group) {
  std::uint32_t header;
  std::memcpy(&header, payload.data() + 4 * group, sizeof(header));
  return header;
}

// A grid would round 0.1 to its step's 8 bits; the code bytes can hold all of it.
TEST(GroupSpecialValues, ConstantGroupsAreExact) {
  const double values[] = {0.0,       -0.0,       0.1,           -1.0 / 3, -10.8,
                           65504.0,   1e-40,      1e300,         -1e300,   5e-324,
                           kInfinity, -kInfinity, std::nan("1"), 0x1p-24,  -1e38};
  for (const GroupFormat& format : all_formats()) {
    for (const double value : values) {
      if (format.zero_exact && value < 0) continue;
      for (const std::int64_t count : {1, 129}) {
        const Elements source = elements_of(format.type, std::vector<double>(count, value));
        const GroupFormat whole = sized(format, count);
        for (const Place& place : places()) {
          SCOPED_TRACE(describe(whole) + " of " + std::to_string(value) + " on " + place.name);
          ASSERT_TRUE(decoded(whole, source, {}, place).bytes == source.bytes);
        }
      }
    }
  }
}

// A payload may come from elsewhere. Restored as a grid without steps, zeros whose other bytes are
// not zero became the smallest positive element where zeros are exact.
TEST(GroupSpecialValues, OnlyTheFirstEightBytesOfAConstantCount) {
  for (GroupFormat format : all_formats()) {
    format.count = 37 * 129;
    format.columns = format.layout == Layout::kStrided ? 37 : 0;
    const core::GroupGeometry geometry(format);
    for (const double value : {0.0, -0.0, 1.5, 1e-40, kInfinity}) {
      const Elements source = elements_of(
          format.type, std::vector<double>(static_cast<std::size_t>(format.count), value));
      Bytes payload = packed(format, source.bytes, {}, reference());
      for (std::int64_t group = 0; group < geometry.groups; ++group) {
        std::byte* const codes = payload.data() + geometry.header_bytes +
                                 static_cast<std::size_t>(group) * geometry.code_bytes;
        std::fill(codes + 8, codes + geometry.code_bytes, static_cast<std::byte>(0x95 + group));
      }
      for (const Place& place : places()) {
        SCOPED_TRACE(describe(format) + " of " + std::to_string(value) + " on " + place.name);
        ASSERT_TRUE(unpacked(format, payload, place) == source.bytes);
      }
    }
  }
}

// Spikes and masks stored as floats. Rounding the range outward needlessly would move both values.
TEST(GroupSpecialValues, TwoValuesThatTheHeaderHoldsAreExactAtOneBit) {
  const std::pair<double, double> pairs[] = {{0.0, 1.0},         {0.0, 1.109375},   {-1.0, 1.0},
                                             {-0.5, 2.5},        {100.0, 101.0},    {-64.0, 0.0},
                                             {2.5, 513.0 / 128}, {1'000.0, 1'001.0}};
  for (const GroupFormat& format : all_formats()) {
    if (format.bits != 1 || format.layout == Layout::kRotated) continue;
    for (const auto& [low, high] : pairs) {
      Random random(5);
      std::vector<double> values(300);
      for (double& value : values) value = random.below(10) < 3 ? high : low;
      const Elements source = elements_of(format.type, values);
      if (source.numbers() != values) continue;  // not numbers of this type
      for (std::uint64_t stream = 0; stream < 50; ++stream)
        ASSERT_TRUE(decoded(sized(format, 300), source, {1, stream}).bytes == source.bytes)
            << describe(format) << ": " << low << ", " << high;
    }
  }
}

// Up to 8 bits: a code of 16 bits leaves 7 bits of fraction in fp32, and rounds up once in 256
// draws.
TEST(GroupSpecialValues, IntegersThatTheCodesCountAreExact) {
  for (const GroupFormat& format : all_formats()) {
    if (format.layout == Layout::kRotated || format.bits == 16) continue;
    const std::uint64_t codes = std::uint64_t{1} << format.bits;
    Random random(6);
    std::vector<double> values(600);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const std::uint64_t ends[] = {0, 1, codes - 1};  // in every group, the last one too
      values[i] = static_cast<double>(i % 64 < 3 ? ends[i % 64] : random.below(codes));
    }
    const Elements source = elements_of(format.type, values);
    for (std::uint64_t stream = 0; stream < 5; ++stream)
      ASSERT_TRUE(decoded(sized(format, 600), source, {2, stream}).bytes == source.bytes)
          << describe(format);
  }
}

TEST(GroupSpecialValues, NonFiniteElementsDecodeToThemselves) {
  const Kind kinds[] = {Kind::kMinusInf, Kind::kPlusInf, Kind::kNan};
  for (const GroupFormat& format : all_formats()) {
    for (const Kind kind : kinds) {
      const Elements source = make_elements(kind, format.type, 300 * 2, format.zero_exact);
      const Elements result = decoded(sized(format, 300 * 2, 2), source);
      for (std::int64_t i = 0; i < source.count(); ++i) {
        const double before = source.at(i), after = result.at(i);
        if (std::isfinite(before)) {
          ASSERT_TRUE(std::isfinite(after)) << describe(format) << ", " << name_of(kind);
          ASSERT_LT(std::fabs(after - before), 9.0);
        } else {
          ASSERT_TRUE(after == before || (std::isnan(before) && std::isnan(after)))
              << describe(format) << ": " << before << " became " << after;
        }
      }
    }
  }
}

TEST(GroupSpecialValues, MixedNonFiniteKindsDecodeToNan) {
  for (const GroupFormat& format : all_formats()) {
    std::vector<double> values(128 + 9);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<double>(i % 7);
    values[3] = kInfinity;
    values[99] = format.zero_exact ? std::nan("") : -kInfinity;
    values[130] = kInfinity;  // alone in its group, unless that holds 256
    const GroupFormat whole = sized(format, 137);
    const Elements result = decoded(whole, elements_of(format.type, values));
    EXPECT_TRUE(std::isnan(result.at(3))) << describe(whole);
    EXPECT_TRUE(std::isnan(result.at(99))) << describe(whole);
    if (format.group == 128) {
      EXPECT_EQ(result.at(130), kInfinity) << describe(whole);
    }
    EXPECT_TRUE(std::isfinite(result.at(4))) << describe(whole);
  }
}

// No code is left for a second finite value.
TEST(GroupSpecialValues, AtOneBitFiniteElementsBesideInfinitiesDecodeToTheirMean) {
  for (const GroupFormat& format : all_formats()) {
    if (format.bits != 1) continue;
    std::vector<double> values(128);
    double sum = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = i % 4 == 0 ? -kInfinity : 5.0 + static_cast<double>(i % 3);
      if (i % 4 != 0) sum += values[i];
    }
    const double mean = sum / 96;
    const Elements result = decoded(sized(format, 128), elements_of(format.type, values));
    for (std::int64_t i = 0; i < 128; ++i) {
      if (i % 4 == 0) {
        EXPECT_EQ(result.at(i), -kInfinity);
      } else {
        // 21 bits of fp32, then 11 of fp16 or 8 of bf16.
        EXPECT_NEAR(result.at(i), mean, mean * (size_of(format.type) == 2 ? 0x1p-8 : 0x1p-12));
      }
    }
  }
}

// Ranges are rounded outward, so the top of the grid is above the largest element.
TEST(GroupSpecialValues, FiniteElementsNeverDecodeToInfinity) {
  for (const GroupFormat& format : all_formats()) {
    const double largest = format.type == ElementType::kF16    ? 65504.0
                           : format.type == ElementType::kBF16 ? 0x1.fep127
                           : format.type == ElementType::kF32  ? FLT_MAX
                                                               : 1e300;
    for (const double share : {1.0, 0.999, 0.5, 0.26, 0.24}) {
      std::vector<double> values(128);
      for (std::size_t i = 0; i < values.size(); ++i)
        values[i] = largest * share * (1 - static_cast<double>(i) * (i % 2 == 0 ? 0.0001 : 0.007)) *
                    (i % 3 == 0 && !format.zero_exact ? -1 : 1);
      values[7] = largest * share;
      const Elements source = elements_of(format.type, values);
      for (std::uint64_t stream = 0; stream < 10; ++stream) {
        const Elements result = decoded(sized(format, 128), source, {3, stream});
        for (std::int64_t i = 0; i < 128; ++i) {
          ASSERT_TRUE(std::isfinite(result.at(i))) << describe(format) << ", share " << share;
          ASSERT_LE(std::fabs(result.at(i)), std::min(largest, double{FLT_MAX}));
        }
      }
    }
  }
}

// A misplaced code or a range that misses an element would move it farther.
TEST(GroupSpecialValues, NoElementMovesByMoreThanAStep) {
  for (const GroupFormat& format : all_formats()) {
    if (format.layout == Layout::kRotated || size_of(format.type) < 4) continue;
    for (const Kind kind : {Kind::kNormal, Kind::kHeavyTailed, Kind::kFarFromZero, Kind::kHuge,
                            Kind::kVeryFar, Kind::kDenormals, Kind::kOneOutlier}) {
      for (const std::int64_t count : {1, 2, 63, 127, 128}) {
        const Elements source = make_elements(kind, format.type, count, format.zero_exact);
        // fp64 elements beyond fp32 become its largest number, unless alone in their group.
        const auto clamped = [](std::vector<double> numbers) {
          for (double& x : numbers) x = std::clamp(x, -double{FLT_MAX}, double{FLT_MAX});
          return numbers;
        };
        const std::vector<double> values = clamped(source.numbers());
        const auto [low, high] = std::minmax_element(values.begin(), values.end());
        const double steps = format.zero_exact ? (1 << format.bits) - 2 : (1 << format.bits) - 1;
        // Far from zero a range widens, a huge one takes all of fp32.
        const double range = kind == Kind::kHuge          ? 2.0 * FLT_MAX
                             : kind == Kind::kVeryFar     ? 4.0
                             : kind == Kind::kFarFromZero ? 0.026
                                                          : *high - *low;
        const double allowed = 1.02 * range / steps + 0x1p-22 * std::max(-*low, *high) + 0x1p-109;
        const std::vector<double> result = clamped(decoded(sized(format, count), source).numbers());
        for (std::size_t i = 0; i < values.size(); ++i)
          ASSERT_LE(std::fabs(result[i] - values[i]), allowed)
              << describe(sized(format, count)) << ", " << name_of(kind) << ", element " << i;
      }
    }
  }
}

TEST(GroupSpecialValues, TheSameKeyGivesTheSameBytesAndAnyOtherGivesOthers) {
  for (const GroupFormat& format : all_formats()) {
    const Elements source = make_elements(Kind::kNormal, format.type, 512, format.zero_exact);
    const GroupFormat whole = sized(format, 512, 4);
    const Bytes payload = packed(whole, source.bytes, Key{7, 7}, reference());
    EXPECT_TRUE(packed(whole, source.bytes, Key{7, 7}, reference()) == payload) << describe(whole);
    EXPECT_FALSE(packed(whole, source.bytes, Key{7, 8}, reference()) == payload) << describe(whole);
    EXPECT_FALSE(packed(whole, source.bytes, Key{8, 7}, reference()) == payload) << describe(whole);
    // Only codes differ: a range does not depend on the key.
    const Bytes other = packed(whole, source.bytes, Key{8, 7}, reference());
    EXPECT_TRUE(std::equal(payload.begin(), payload.begin() + 16, other.begin()));
  }
}

TEST(GroupSpecialValues, ARotatedGroupThatWouldOverflowIsStoredUnrotated) {
  const GroupFormat format{.bits = 4, .layout = Layout::kRotated, .count = 256};
  std::vector<double> values(256);
  for (int i = 0; i < 256; ++i) {
    // All in phase with one row of the transform in the first group, not in the second.
    const bool flip = (core::rotation_signs(i % 128 / 32) >> core::sign_bit(i) & 1u) != 0;
    const double magnitude = i < 128 ? 0x1p125 : 1.0;
    values[static_cast<std::size_t>(i)] = (flip ? -1 : 1) * magnitude * (1 - 0.001 * (i % 128));
  }
  const Elements source = elements_of(format.type, values);
  const Bytes payload = packed(format, source.bytes, Key{}, reference());
  EXPECT_NE(header_of(payload, 0) & core::kExtended, 0u);
  EXPECT_EQ(header_of(payload, 1) & core::kExtended, 0u);
  const Elements result = decoded(format, source);
  for (std::int64_t i = 0; i < 128; ++i)
    EXPECT_LE(std::fabs(result.at(i) - source.at(i)), 1.2 * 0x1p126 / 15);
}

// The sums on the way back are 128 times the element: it must be scaled down before, not after.
TEST(GroupSpecialValues, ASpikeInARotatedGroupStaysFinite) {
  constexpr std::int64_t kCount = 128 + 40;  // a short group takes another path
  for (const ElementType type : {ElementType::kF32, ElementType::kBF16, ElementType::kF64}) {
    for (const double spike : {0x1p119, 0x1p122, -0x1p125, 0x1p126, 0x1p127}) {
      const GroupFormat format{
          .type = type, .bits = 8, .layout = Layout::kRotated, .count = kCount};
      std::vector<double> values(kCount);
      values[5] = values[128 + 5] = spike;
      values[7] = values[128 + 7] = 1.0;
      const Elements source = elements_of(type, values);
      for (const Place& place : places()) {
        SCOPED_TRACE(describe(format) + ", " + std::to_string(spike) + " on " + place.name);
        const Elements result = decoded(format, source, {}, place);
        EXPECT_NEAR(result.at(5) / spike, 1.0, 0.02);
        EXPECT_NEAR(result.at(128 + 5) / spike, 1.0, 0.02);
        for (std::int64_t i = 0; i < kCount; ++i) EXPECT_TRUE(std::isfinite(result.at(i)));
      }
    }
  }
}

TEST(GroupSpecialValues, ARotatedGroupWithInfinitiesIsStoredUnrotated) {
  const GroupFormat format{.bits = 4, .layout = Layout::kRotated, .count = 128};
  const Elements source = make_elements(Kind::kMinusInf, format.type, 128, false);
  const Bytes payload = packed(format, source.bytes, Key{}, reference());
  EXPECT_NE(header_of(payload, 0) & core::kExtended, 0u);
}

// The point of a rotation: all elements share the range of one large element.
TEST(GroupSpecialValues, ARotationSpreadsAnOutlier) {
  GroupFormat format{.bits = 4, .count = 1280};
  Elements source = make_elements(Kind::kNormal, format.type, format.count, false);
  std::vector<double> values = source.numbers();
  for (std::size_t i = 17; i < values.size(); i += 128) values[i] = 100.0;
  source = elements_of(format.type, values);
  double flat = 0, rotated = 0;
  ASSERT_TRUE(expected_squared_error(format, source.bytes.data(), &flat).ok());
  format.layout = Layout::kRotated;
  ASSERT_TRUE(expected_squared_error(format, source.bytes.data(), &rotated).ok());
  EXPECT_LT(rotated, flat / 10);
}

TEST(GroupSpecialValues, AnEmptyTensorTakesNoBytes) {
  for (const GroupFormat& format : all_formats()) {
    const GroupFormat empty = sized(format, 0);
    EXPECT_EQ(packed_bytes(empty), 0u);
    EXPECT_TRUE(pack(empty, nullptr, {}, {}, {}).ok()) << describe(empty);
    EXPECT_TRUE(unpack(empty, {}, nullptr, {}).ok()) << describe(empty);
  }
}

}  // namespace
}  // namespace backfold::testing
