// SPDX-License-Identifier: Apache-2.0
//
// How a group's range becomes 32 bits: rounded outward, and barely wider.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>

#include "backfold/widths.h"
#include "base/arithmetic.h"

namespace backfold::core {
namespace {

// Every set of levels that a group may have: all widths, zero-exact or not, top code reserved or
// not.
template <typename Visit>
void for_all_levels(Visit visit) {
  for (const int bits : kCodeWidths) {
    for (const bool zero_exact : {false, true}) {
      for (const bool reserve : {false, true}) {
        const Levels levels = levels_for(bits, zero_exact, reserve);
        if (levels.steps > 0) visit(levels, reserve ? kNan : kFinite);
      }
    }
  }
}

struct Decoded {
  double low;   // value of the first code
  double high;  // of the last
  double step;
};

Decoded decoded(const Range& range, const Levels& levels) {
  const Grid grid = grid_in(range.header, levels);
  return {grid.base, static_cast<double>(grid.base) + levels.steps * static_cast<double>(grid.step),
          grid.step};
}

// fp32 rounding of the group's end points, the only inaccuracy allowed: two units in the last place
// of the range.
double slack(float low, float high) {
  return 0x1p-22 * (std::fabs(static_cast<double>(low)) + std::fabs(static_cast<double>(high)));
}

void expect_outward(float low, float high, const Levels& levels, Kind kind) {
  const Range range = round_outward(low, high, levels, kind);
  const Decoded found = decoded(range, levels);
  ASSERT_LE(found.low, low) << "steps " << levels.steps << " low " << low << " high " << high;
  ASSERT_GE(found.high, high - slack(low, high))
      << "steps " << levels.steps << " low " << low << " high " << high;
  // Codes are drawn and decoded with the same base.
  ASSERT_EQ(range.base, static_cast<float>(found.low)) << "low " << low << " high " << high;
  ASSERT_EQ(range.inverse, 1.0f / static_cast<float>(found.step));
  ASSERT_EQ(kind_in(range.header), kind);
}

// The variance of stochastic rounding grows with the square of the step.
double inflation(float low, float high, const Levels& levels) {
  const Decoded found = decoded(round_outward(low, high, levels, kFinite), levels);
  const double ratio = found.step * levels.steps / (static_cast<double>(high) - low);
  return ratio * ratio;
}

// Ranges [low, low + range] with |low| = distance * range, `count` of them at random.
template <typename Visit>
void for_ranges(double distance, int count, Visit visit) {
  std::mt19937_64 random(17);
  std::uniform_real_distribution<double> exponent(-30, 30), sign(-1, 1);
  for (int i = 0; i < count; ++i) {
    const double range = std::exp2(exponent(random));
    const double middle = distance * range * (sign(random) < 0 ? -1 : 1);
    const float low = static_cast<float>(middle);
    const float high = static_cast<float>(static_cast<double>(low) + range);
    if (low < high) visit(low, high);
  }
}

TEST(GroupRange, ReachesAroundTheGroup) {
  for_all_levels([](const Levels& levels, Kind kind) {
    for (const double distance : {0.0, 0.3, 0.5, 1.0, 7.0, 100.0, 127.9, 128.1, 1e3, 1e5, 1e7})
      for_ranges(distance, 3'000,
                 [&](float low, float high) { expect_outward(low, high, levels, kind); });
  });
}

// Where rounding outward carries the range over a power of two, the unit of the minimum doubles.
TEST(GroupRange, ReachesAroundTheGroupNearPowersOfTwo) {
  for_all_levels([](const Levels& levels, Kind kind) {
    for (const float power : {0x1p-60f, 0.25f, 1.0f, 2.0f, 0x1p60f}) {
      for (int ulps = -40; ulps <= 40; ++ulps) {
        const float range = power * (1.0f + static_cast<float>(ulps) * 0x1p-23f);
        const float wide = power * (1.0f + static_cast<float>(ulps) * 0x1p-9f);
        for (const float offset : {0.0f, -0.5f, -1.0f, 0.3f, -63.7f, 90.0f}) {
          const float low = offset * power;
          expect_outward(low, low + range, levels, kind);
          expect_outward(low, low + wide, levels, kind);
        }
      }
    }
  });
}

TEST(GroupRange, ReachesAroundTinyHugeAndSingleValues) {
  for_all_levels([](const Levels& levels, Kind kind) {
    for (const float value :
         {0.0f, 0x1p-149f, 0x1p-126f, 1e-30f, 0.1f, 10.8f, 65504.0f, 0x1p126f}) {
      expect_outward(value, value, levels, kind);
      expect_outward(-value, -value, levels, kind);
      expect_outward(-value, value, levels, kind);
      expect_outward(0.0f, value, levels, kind);
      expect_outward(-value, 0.0f, levels, kind);
      expect_outward(value, std::min(value * 1.0001f, kHuge), levels, kind);
    }
  });
}

// A bf16 minimum beside a bf16 step scores 3.2 at 100 ranges.
TEST(GroupRange, GrowsTheVarianceByLessThanFivePercentUpToAHundredRangesFromZero) {
  double worst = 0;
  for (const int bits : kCodeWidths) {
    const Levels levels = levels_for(bits, false, false);
    for (const double distance : {0.0, 0.5, 1.0, 3.0, 10.0, 30.0, 99.0, 100.0})
      for_ranges(distance, 20'000, [&](float low, float high) {
        worst = std::max(worst, inflation(low, high, levels));
      });
  }
  std::printf("variance grows by a factor of %.4f at most\n", worst);
  EXPECT_LT(worst, 1.05);
  EXPECT_GT(worst, 1.02);  // the sweep comes near the bound of (1 + 2/128)^2
}

// What a 16-bit minimum would do if it were a bf16 number instead of a count of units.
double inflation_with_bf16_minimum(float low, float high) {
  float base = bfloat_to_float(float_to_bfloat(low));
  if (base > low) base -= std::fabs(base) * 0x1p-7f;
  const double ratio = (static_cast<double>(high) - base) / (static_cast<double>(high) - low);
  return ratio * ratio;
}

// docs/formats.md quotes this table.
TEST(GroupRange, GrowsTheVarianceGracefullyBeyond) {
  std::printf("|minimum| / range   variance grows by: at most   on average   bf16 minimum\n");
  for (const double distance : {0.0, 1.0, 10.0, 100.0, 540.0, 1'000.0, 3'000.0}) {
    double worst = 0, sum = 0, plain = 0;
    int count = 0;
    for (const int bits : kCodeWidths) {
      const Levels levels = levels_for(bits, false, false);
      for_ranges(distance, 20'000, [&](float low, float high) {
        const double factor = inflation(low, high, levels);
        worst = std::max(worst, factor);
        sum += factor;
        ++count;
        plain = std::max(plain, inflation_with_bf16_minimum(low, high));
      });
    }
    std::printf("%17.0f %28.3f %12.3f %14.3g\n", distance, worst, sum / count, plain);
    if (distance <= 100) {
      EXPECT_LT(worst, 1.05);
    } else if (distance <= 1'000) {
      EXPECT_LT(worst, 1.8);
    } else {
      EXPECT_LT(worst, 16.0);  // a header reaches 1,024 ranges: beyond, the range widens
    }
  }
}

// Small integers stay on the grid: code = value.
TEST(GroupRange, KeepsStepsThatFitExactly) {
  for (const int bits : kCodeWidths) {
    const Levels levels = levels_for(bits, false, false);
    for (const float step : {1.0f, 0.5f, 0x1.8p3f, 0x1.fep-20f, 0x1.02p40f}) {
      const float octave = std::exp2(std::floor(std::log2(levels.count * step)));
      for (const float multiple : {0.0f, -0.5f, 1.0f, -37.0f, 63.25f}) {
        const float low = multiple * octave;  // a multiple of the minimum's unit
        const float high = low + levels.count * step;
        if (high - low != levels.count * step) continue;
        const Grid grid = grid_in(round_outward(low, high, levels, kFinite).header, levels);
        EXPECT_EQ(grid.step, step) << bits << " bits, low " << low;
        EXPECT_EQ(grid.base, low) << bits << " bits, low " << low;
      }
    }
  }
}

// A rotated group's header must be an ordinary one, however far from zero its elements are.
TEST(GroupRange, OfARotatedGroupHasAnOrdinaryHeader) {
  for (const int bits : kCodeWidths) {
    const Levels levels = levels_for(bits, false, false);
    for (const double distance : {0.0, 1.0, 100.0, 127.0, 128.0, 129.0, 1e3, 1e6}) {
      for_ranges(distance, 3'000, [&](float low, float high) {
        const Range range = round_outward_rotated(low, high, levels);
        ASSERT_EQ(range.header & kExtended, 0u) << low << " to " << high;
        ASSERT_NE(range.header & kExponentMask, kExponentMask);
        const Decoded found = decoded(range, levels);
        ASSERT_LE(found.low, low);
        ASSERT_GE(found.high, high - slack(low, high));
      });
    }
  }
}

TEST(GroupRange, AsksForAnExtendedHeaderWhereToldTo) {
  const Levels levels = levels_for(4, false, false);
  EXPECT_EQ(round_outward(-1.0f, 1.0f, levels, kFinite).header & kExtended, 0u);
  const Range range = round_outward(-1.0f, 1.0f, levels, kFinite, true);
  EXPECT_EQ(range.header & kExtended, kExtended);
  EXPECT_EQ(kind_in(range.header), kFinite);
  EXPECT_LE(decoded(range, levels).low, -1.0);
  EXPECT_GE(decoded(range, levels).high, 1.0);
}

}  // namespace
}  // namespace backfold::core
