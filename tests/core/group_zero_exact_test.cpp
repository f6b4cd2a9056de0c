// SPDX-License-Identifier: Apache-2.0
//
// Zero-exact mode: one packet that answers "is it positive" exactly and "how much" without bias.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/group_data.h"
#include "core/support.h"

namespace backfold::testing {
namespace {

std::vector<GroupFormat> zero_exact_formats() {
  std::vector<GroupFormat> formats = all_formats();
  std::erase_if(formats, [](const GroupFormat& format) { return !format.zero_exact; });
  return formats;
}

// Zeros, the type's smallest denormal, its neighbours, and numbers that dwarf them.
Elements awkward(ElementType type, std::int64_t count, double largest) {
  const double smallest = type == ElementType::kF16    ? 0x1p-24
                          : type == ElementType::kBF16 ? 0x1p-133
                          : type == ElementType::kF64  ? 0x1p-1074
                                                       : 0x1p-149;
  Random random(9);
  std::vector<double> values(static_cast<std::size_t>(count));
  for (double& value : values) {
    switch (random.below(6)) {
      case 0:
        value = 0.0;
        break;
      case 1:
        value = -0.0;
        break;
      case 2:
        value = smallest;
        break;
      case 3:
        value = 3 * smallest;
        break;
      default:
        value = largest * static_cast<double>(random.below(1'000) + 1) / 1'000;
    }
  }
  return elements_of(type, values);
}

// ReLU's backward reads this. A plain grid loses the sign of what is below half a step.
TEST(GroupZeroExact, IsPositiveExactlyWhereTheSourceIs) {
  for (GroupFormat format : zero_exact_formats()) {
    format.count = 261 * 3;
    format.columns = format.layout == Layout::kStrided ? 3 : 0;
    for (const double largest : {1e-45, 1e-7, 1.0, 6e4, 1e38}) {
      const Elements source = awkward(format.type, format.count, largest);
      for (const Place& place : places()) {
        const Bytes payload = packed(format, source.bytes, Key{1, 1}, place);
        const Elements result{format.type, unpacked(format, payload, place)};
        for (std::int64_t i = 0; i < format.count; ++i) {
          ASSERT_EQ(result.at(i) > 0, source.at(i) > 0)
              << describe(format) << " on " << place.name << ": " << source.at(i) << " became "
              << result.at(i);
          ASSERT_EQ(result.at(i) == 0, source.at(i) == 0) << describe(format);
        }
      }
    }
  }
}

TEST(GroupZeroExact, KeepsZerosBesideInfinitiesAndNan) {
  for (GroupFormat format : zero_exact_formats()) {
    format.count = 256;
    format.columns = format.layout == Layout::kStrided ? 2 : 0;
    for (const Kind kind : {Kind::kPlusInf, Kind::kNan}) {
      Elements source = make_elements(kind, format.type, format.count, true);
      std::vector<double> values = source.numbers();
      for (std::size_t i = 0; i < values.size(); i += 3) values[i] = 0.0;
      source = elements_of(format.type, values);
      const Bytes payload = packed(format, source.bytes, Key{}, reference());
      const Elements result{format.type, unpacked(format, payload, reference())};
      for (std::int64_t i = 0; i < format.count; ++i) {
        ASSERT_EQ(result.at(i) == 0.0, source.at(i) == 0.0) << describe(format);
        ASSERT_EQ(std::isnan(result.at(i)), std::isnan(source.at(i))) << describe(format);
        ASSERT_EQ(std::isinf(result.at(i)), std::isinf(source.at(i))) << describe(format);
      }
    }
  }
}

// At equal bytes: b bits zero-exact have 2^b - 2 steps, b - 1 bits beside a sign bit have 2^(b-1)
// - 1.
TEST(GroupZeroExact, HasAQuarterOfTheErrorOfOneBitLessAndASignBit) {
  for (const int bits : {2, 3, 4, 5, 6}) {
    GroupFormat format{.bits = bits, .zero_exact = true, .count = 128 * 200};
    const Elements source = make_elements(Kind::kRelu, format.type, format.count, true);
    double together = 0, apart = 0;
    ASSERT_TRUE(expected_squared_error(format, source.bytes.data(), &together).ok());
    format.bits = bits - 1;
    format.zero_exact = false;
    ASSERT_TRUE(expected_squared_error(format, source.bytes.data(), &apart).ok());
    EXPECT_NEAR(together / apart, 0.25, 0.04) << bits << " bits";  // 1 without the spare code
  }
}

// What the exact zero costs relative to a plain grid of the same width: one step of 2^b - 1.
TEST(GroupZeroExact, CostsFifteenPercentAtFourBits) {
  GroupFormat format{.bits = 4, .zero_exact = true, .count = 128 * 200};
  const Elements source = make_elements(Kind::kRelu, format.type, format.count, true);
  double zero_exact = 0, plain = 0;
  ASSERT_TRUE(expected_squared_error(format, source.bytes.data(), &zero_exact).ok());
  format.zero_exact = false;
  ASSERT_TRUE(expected_squared_error(format, source.bytes.data(), &plain).ok());
  EXPECT_NEAR(zero_exact / plain, 1.15, 0.05);
}

}  // namespace
}  // namespace backfold::testing
