// SPDX-License-Identifier: Apache-2.0
//
// Unbiased, and with the variance of the error model: packs the same tensor under many keys and
// examines the errors. scripts/mutate shows that these tests fail when the arithmetic is wrong.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "core/group_data.h"
#include "core/support.h"
#include "group/geometry.h"

namespace backfold::testing {
namespace {

struct alignas(kPayloadAlignment) Block {
  std::byte bytes[kPayloadAlignment];
};

// The errors of `draws` packets of one fp32 tensor. Non-finite elements have none.
class Draws {
 public:
  Draws(const GroupFormat& format, const Elements& source, const Execution& execution, int draws)
      : format_(format),
        source_(source.numbers()),
        draws_(draws),
        sum_(source_.size()),
        squares_(source_.size()),
        group_sum_(static_cast<std::size_t>(core::GroupGeometry(format).groups)),
        group_squares_(group_sum_.size()) {
    std::vector<Block> payload(packed_bytes(format) / sizeof(Block));
    const Payload room{payload.data(), packed_bytes(format)};
    std::vector<float> floats(source_.size()), decoded(source_.size());
    std::memcpy(floats.data(), source.bytes.data(), source.bytes.size());
    for (int draw = 0; draw < draws; ++draw) {
      const Key key{.seed = 1, .stream = static_cast<std::uint64_t>(draw)};
      EXPECT_TRUE(pack(format, floats.data(), key, room, execution).ok());
      EXPECT_TRUE(unpack(format, room, decoded.data(), execution).ok());
      add(decoded);
    }
  }

  // Per draw, over all elements.
  double squared_error() const {
    return std::accumulate(squares_.begin(), squares_.end(), 0.0) / draws_;
  }

  // Mean error of the worst element in standard deviations of that mean, beyond `tolerance`, the
  // part of the group's magnitude that fp32 rounding may take.
  double worst_z(double tolerance) const {
    double worst = 0;
    for (std::size_t g = 0; g < group_sum_.size(); ++g) {
      const double step = range(g) / std::max(1, (1 << format_.bits) - 3);
      for_elements(g, [&](std::size_t i) {
        // An element close to a code may not have left it in these draws: count one that did.
        const double deviation = std::sqrt(variance(i) / draws_) + step / draws_;
        worst = std::max(worst, z_score(sum_[i] / draws_, tolerance * magnitude(g), deviation));
      });
    }
    return worst;
  }

  // The same for the sum of each group.
  double worst_group_z(double tolerance) const {
    double worst = 0;
    for (std::size_t g = 0; g < group_sum_.size(); ++g) {
      const double size = core::span_of(format_, static_cast<std::int64_t>(g)).count;
      worst = std::max(worst, z_score(group_sum_[g] / draws_, tolerance * magnitude(g) * size,
                                      std::sqrt(group_variance(g) / draws_)));
    }
    return worst;
  }

  // Variance of the groups' sums / sum of their elements' variances: 1 where errors of
  // different elements are not correlated.
  double correlation() const {
    double together = 0, alone = 0;
    for (std::size_t g = 0; g < group_sum_.size(); ++g) together += group_variance(g);
    for (std::size_t i = 0; i < sum_.size(); ++i) alone += variance(i);
    return together / alone;
  }

 private:
  template <typename Visit>
  void for_elements(std::size_t group, Visit visit) const {
    const core::GroupSpan span = core::span_of(format_, static_cast<std::int64_t>(group));
    for (int i = 0; i < span.count; ++i)
      visit(static_cast<std::size_t>(span.offset + i * span.stride));
  }

  void add(const std::vector<float>& decoded) {
    for (std::size_t g = 0; g < group_sum_.size(); ++g) {
      double total = 0;
      for_elements(g, [&](std::size_t i) {
        if (!std::isfinite(source_[i])) return;
        const double error = decoded[i] - source_[i];
        sum_[i] += error;
        squares_[i] += error * error;
        total += error;
      });
      group_sum_[g] += total;
      group_squares_[g] += total * total;
    }
  }

  double z_score(double mean, double allowed, double deviation) const {
    const double excess = std::max(0.0, std::fabs(mean) - allowed);
    return excess == 0 ? 0 : excess / std::max(deviation, 1e-9 * allowed);
  }
  double variance(std::size_t i) const {
    const double mean = sum_[i] / draws_;
    return std::max(0.0, squares_[i] / draws_ - mean * mean);
  }
  double group_variance(std::size_t g) const {
    const double mean = group_sum_[g] / draws_;
    return std::max(0.0, group_squares_[g] / draws_ - mean * mean);
  }
  double magnitude(std::size_t group) const {
    double most = 0;
    for_elements(group, [&](std::size_t i) {
      if (std::isfinite(source_[i])) most = std::max(most, std::fabs(source_[i]));
    });
    return most;
  }
  double range(std::size_t group) const {
    double low = INFINITY, high = -INFINITY;
    for_elements(group, [&](std::size_t i) {
      if (!std::isfinite(source_[i])) return;
      low = std::min(low, source_[i]);
      high = std::max(high, source_[i]);
    });
    return high - low;
  }

  GroupFormat format_;
  std::vector<double> source_;
  int draws_;
  std::vector<double> sum_, squares_;
  std::vector<double> group_sum_, group_squares_;
};

// fp32 rounding takes 2^-23 of an element; a rotation adds seven roundings of sums of 128.
double tolerance(const GroupFormat& format) {
  return format.layout == Layout::kRotated ? 0x1p-19 : 0x1p-22;
}

GroupFormat sized(GroupFormat format) {
  format.count = 131 * 3;  // three groups and a short one; strided, three whole and three short
  format.columns = format.layout == Layout::kStrided ? 3 : 0;
  return format;
}

// Every fp32 format, on the reference and on the best SIMD target.
template <typename Visit>
void for_formats(Visit visit) {
  for (const GroupFormat& format : all_formats()) {
    if (format.type != ElementType::kF32) continue;
    for (const Execution& execution : {reference().execution, Execution{}}) {
      SCOPED_TRACE(describe(sized(format)) + " on " + std::string(expected_runner(execution)));
      visit(sized(format), execution);
    }
  }
}

TEST(GroupStatistics, DecodesToTheSourceOnAverage) {
  for_formats([](const GroupFormat& format, const Execution& execution) {
    const auto source =
        make_elements(Kind::kHeavyTailed, format.type, format.count, format.zero_exact);
    const Draws draws(format, source, execution, 2'048);
    EXPECT_LT(draws.worst_z(tolerance(format)), 6.0);        // rounding to nearest: above 60
    EXPECT_LT(draws.worst_group_z(tolerance(format)), 5.0);  // a step rounded down: up to 1e8
  });
}

// The other forms of a group: far from zero, huge, with a reserved code.
TEST(GroupStatistics, DecodesToTheSourceOnAverageInEveryForm) {
  for_formats([](const GroupFormat& format, const Execution& execution) {
    if (format.bits != 2 && format.bits != 5 && format.bits != 8) return;
    for (const Kind kind : {Kind::kFarFromZero, Kind::kVeryFar, Kind::kHuge, Kind::kMinusInf}) {
      SCOPED_TRACE(name_of(kind));
      const auto source = make_elements(kind, format.type, format.count, format.zero_exact);
      const Draws draws(format, source, execution, 1'024);
      EXPECT_LT(draws.worst_z(tolerance(format)), 6.0);
      EXPECT_LT(draws.worst_group_z(tolerance(format)), 5.0);
    }
  });
}

TEST(GroupStatistics, HasTheSquaredErrorOfTheModel) {
  for_formats([](const GroupFormat& format, const Execution& execution) {
    for (const Kind kind : {Kind::kNormal, Kind::kFarFromZero, Kind::kPlusInf}) {
      // 65,535 steps of 0.02 / 65,535 are finer than fp32 numbers at -10.8: there is no error.
      if (format.bits == 16 && kind == Kind::kFarFromZero) continue;
      SCOPED_TRACE(name_of(kind));
      const auto source = make_elements(kind, format.type, format.count, format.zero_exact);
      double expected = 0;
      ASSERT_TRUE(expected_squared_error(format, source.bytes.data(), &expected).ok());
      const Draws draws(format, source, execution, 512);
      EXPECT_NEAR(draws.squared_error() / expected, 1.0, 0.03);  // rounding to nearest: 0.4 to 0.9
    }
  });
}

// Errors of one tensor cancel in a sum as independent ones do; one random number for eight elements
// would score 8 here.
TEST(GroupStatistics, HasErrorsThatDoNotAddUp) {
  for_formats([](const GroupFormat& format, const Execution& execution) {
    if (format.bits != 1 && format.bits != 4) return;
    const auto source = make_elements(Kind::kNormal, format.type, format.count, format.zero_exact);
    const Draws draws(format, source, execution, 2'048);
    EXPECT_NEAR(draws.correlation(), 1.0, 5 * std::sqrt(2.0 / 2'048));
  });
}

// The squared error of a grid with unrounded end points, to show what the 32-bit header costs.
TEST(GroupStatistics, HasTheSquaredErrorOfAnExactGridUpToAFewPercent) {
  for (const int bits : kCodeWidths) {
    const GroupFormat format{.bits = bits, .count = 128 * 64};
    const auto source = make_elements(Kind::kNormal, format.type, format.count, false);
    const auto values = source.numbers();
    double ideal = 0;
    for (std::size_t begin = 0; begin < values.size(); begin += 128) {
      const auto group = std::span(values).subspan(begin, 128);
      const auto [low, high] = std::minmax_element(group.begin(), group.end());
      const double step = (*high - *low) / ((1 << bits) - 1);
      for (const double value : group) {
        const double position = (value - *low) / step;
        const double fraction = position - std::floor(position);
        ideal += step * step * fraction * (1 - fraction);
      }
    }
    double expected = 0;
    ASSERT_TRUE(expected_squared_error(format, source.bytes.data(), &expected).ok());
    EXPECT_GT(expected / ideal, 0.97) << bits << " bits";
    EXPECT_LT(expected / ideal, 1.05) << bits << " bits";
    const Draws draws(format, source, Execution{}, 64);
    EXPECT_NEAR(draws.squared_error() / ideal, 1.01, 0.04) << bits << " bits";
  }
}

}  // namespace
}  // namespace backfold::testing
