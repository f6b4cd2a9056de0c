// SPDX-License-Identifier: Apache-2.0

#include "backfold/batch_search.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>
#include <string>
#include <vector>

namespace backfold {
namespace {

constexpr std::int64_t kMiB = 1 << 20;

struct Found {
  std::optional<std::int64_t> largest;
  std::vector<std::int64_t> batches;
};

// Runs a search over steps of known peaks, in memory that ends at `memory`.
Found search(const BatchSearchOptions& options, std::int64_t memory,
             const std::function<std::int64_t(std::int64_t)>& peak_of) {
  EXPECT_TRUE(validate(options).ok());
  BatchSearch search(options);
  Found found;
  while (const auto batch = search.next()) {
    found.batches.push_back(*batch);
    if (found.batches.size() > 1'000) break;
    const std::int64_t peak = peak_of(*batch);
    const bool fits = peak <= memory;
    search.tried(*batch, fits, fits ? peak : 0);
  }
  found.largest = search.largest();
  return found;
}

std::function<std::int64_t(std::int64_t)> line(std::int64_t base, std::int64_t each) {
  return [=](std::int64_t batch) { return base + each * batch; };
}

TEST(BatchSearch, MeetsALimitInThreeTrialsBeyondItsGrowthWhereThePeakIsALine) {
  for (const std::int64_t each : {std::int64_t{1'000}, 3 * kMiB, 777 * kMiB}) {
    const std::int64_t memory = 16'000 * kMiB, base = 1'500 * kMiB;
    const std::int64_t truth = (memory - base) / each;
    const auto found =
        search({.start = 1, .limit = memory, .trials = 40}, memory, line(base, each));
    ASSERT_TRUE(found.largest);
    EXPECT_LE(*found.largest, truth);
    EXPECT_GE(static_cast<double>(*found.largest), static_cast<double>(truth) * 31 / 32) << each;
    // Doubling alone takes 24 trials for the first.
    const int growing = static_cast<int>(std::ceil(std::log2(static_cast<double>(truth)) / 2));
    EXPECT_LE(static_cast<int>(found.batches.size()), growing + 3) << each;
  }
}

TEST(BatchSearch, FindsTheLargestWithoutALimit) {
  const std::int64_t memory = 16'000 * kMiB;
  for (const std::int64_t each : {40 * kMiB, 333 * kMiB, 1'000 * kMiB}) {
    const std::int64_t truth = memory / each;
    const auto found = search({.trials = 30}, memory, line(0, each));
    ASSERT_TRUE(found.largest);
    EXPECT_LE(*found.largest, truth);
    EXPECT_GE(*found.largest + std::max<std::int64_t>(1, *found.largest / 32), truth);
  }
}

TEST(BatchSearch, GoesDownToOneSample) {
  const auto found = search({.start = 64}, 16'000 * kMiB, line(0, 15'000 * kMiB));
  EXPECT_EQ(found.largest, 1);
  const auto none = search({.start = 64}, 16'000 * kMiB, line(0, 17'000 * kMiB));
  EXPECT_FALSE(none.largest);
  EXPECT_EQ(none.batches.back(), 1);
}

TEST(BatchSearch, NeverTriesABatchTwiceAndEndsAfterItsTrials) {
  std::mt19937 random(3);
  for (int i = 0; i < 500; ++i) {
    const auto draw = [&](std::int64_t least, std::int64_t most) {
      return std::uniform_int_distribution<std::int64_t>(least, most)(random);
    };
    const BatchSearchOptions options{.start = draw(1, 300),
                                     .multiple = draw(1, 16),
                                     .limit = draw(0, 1) * draw(1, 20'000) * kMiB,
                                     .trials = static_cast<int>(draw(1, 20))};
    const std::int64_t memory = draw(1, 20'000) * kMiB, base = draw(0, 2'000) * kMiB;
    const std::int64_t each = draw(1, 2'000) * kMiB;
    // An allocator's rounding: the peak jumps.
    const std::int64_t jump = draw(1, 512) * kMiB;
    const auto peak_of = [&](std::int64_t batch) {
      return (base + each * batch + jump - 1) / jump * jump;
    };
    auto found = search(options, memory, peak_of);
    EXPECT_LE(found.batches.size(), static_cast<std::size_t>(options.trials));
    const auto tried = found.batches;
    std::sort(found.batches.begin(), found.batches.end());
    EXPECT_EQ(std::adjacent_find(found.batches.begin(), found.batches.end()), found.batches.end());
    for (const std::int64_t batch : tried) {
      EXPECT_GE(batch, 1);
      EXPECT_TRUE(batch % options.multiple == 0 || batch == options.start ||
                  batch < options.multiple)
          << batch << " of " << options.multiple;
    }
    if (found.largest) {
      EXPECT_LE(peak_of(*found.largest), memory);
      EXPECT_LE(peak_of(*found.largest), options.limit > 0 ? options.limit : memory);
    }
  }
}

TEST(BatchSearch, ComesBackFromALineThatWasWrong) {
  // Quadratic in the batch: the line through the first two is far too hopeful.
  const std::int64_t memory = 16'000 * kMiB;
  const auto peak_of = [](std::int64_t batch) { return kMiB * batch * batch / 4 + 100 * kMiB; };
  const auto found = search({.limit = memory, .trials = 30}, memory, peak_of);
  ASSERT_TRUE(found.largest);
  EXPECT_GE(*found.largest, 252 * 31 / 32);
  EXPECT_LE(*found.largest, 252);
}

TEST(BatchSearch, TakesWhatFitsOverAnEarlierFailure) {
  BatchSearch search({.start = 8, .trials = 12});
  search.tried(8, true, 0);
  search.tried(16, false, 0);  // memory was in pieces
  search.tried(16, true, 0);
  EXPECT_EQ(search.largest(), 16);
  EXPECT_EQ(search.next(), 32);
}

TEST(BatchSearch, RefusesOptionsByName) {
  const auto message = [](const BatchSearchOptions& options) {
    return std::string(validate(options).message());
  };
  EXPECT_EQ(message({.start = 0}), "start must be from 1 to 2^48, got 0");
  EXPECT_EQ(message({.multiple = -2}), "multiple must be from 1 to 2^48, got -2");
  EXPECT_EQ(message({.trials = 0}), "trials must be from 1 to 2^48, got 0");
  EXPECT_EQ(message({.limit = -1}), "limit must be a number of bytes, or 0 for none, got -1");
  EXPECT_TRUE(validate({}).ok());
}

}  // namespace
}  // namespace backfold
