// SPDX-License-Identifier: Apache-2.0

#include "torch/timeline.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "torch/capture/site.h"

namespace backfold::torch_layer {
namespace {

using Curve = Timeline::Curve;

struct Saving {
  Charge plain, held;
};

Saving save(const std::shared_ptr<Timeline>& timeline, const Site& site, std::int64_t plain,
            std::int64_t held) {
  Saving saving{{timeline, site, Curve::kPlain, plain}, {timeline, site, Curve::kHeld, held}};
  timeline->saved(site);
  return saving;
}

TEST(Timeline, RisesWithSavesAndFallsAsTheyGo) {
  const auto timeline = std::make_shared<Timeline>();
  Site a, b;
  timeline->begin(1);
  {
    const Saving first = save(timeline, a, 1000, 100);
    const Saving second = save(timeline, b, 500, 70);
    timeline->end_block();
    timeline->read(b, 500);
  }
  const Timeline::Recorded recorded = timeline->recorded();
  EXPECT_EQ(recorded.events, 7);  // two saves, a read, four charges that end
  ASSERT_EQ(recorded.kept.size(), 7u);
  EXPECT_EQ(recorded.kept[1].plain, 1500);
  EXPECT_EQ(recorded.kept[1].held, 170);
  EXPECT_FALSE(recorded.kept[1].backward);
  EXPECT_TRUE(recorded.kept[2].backward);
  EXPECT_EQ(recorded.kept[2].made, 500);
  EXPECT_EQ(recorded.kept[6].plain, 0);
  EXPECT_EQ(recorded.kept[6].held, 0);
  EXPECT_EQ(recorded.most_plain.number, 1);
  EXPECT_EQ(recorded.most_held.number, 1);
  EXPECT_EQ(recorded.most_folded.number, 2);
  EXPECT_EQ(recorded.most_folded.site, &b);
}

TEST(Timeline, CarriesOverWhatAnEarlierStepLeft) {
  const auto timeline = std::make_shared<Timeline>();
  Site site;
  timeline->begin(1);
  Saving kept = save(timeline, site, 64, 8);
  timeline->end_block();
  timeline->begin(2);
  const Saving next = save(timeline, site, 32, 4);
  kept = {};
  const Timeline::Recorded recorded = timeline->recorded();
  EXPECT_EQ(recorded.step, 2);
  EXPECT_EQ(recorded.carried_plain, 64);
  EXPECT_EQ(recorded.carried_held, 8);
  EXPECT_EQ(recorded.most_plain.plain, 96);
  EXPECT_EQ(recorded.kept.back().plain, 32);
}

TEST(Timeline, KeepsThePeaksAndTheEndOfALongStep) {
  const auto timeline = std::make_shared<Timeline>();
  Site site, peak;
  timeline->begin(1);
  constexpr int kSaves = 100'003;
  for (int i = 0; i < kSaves; ++i) {
    if (i == 77'777) save(timeline, peak, 10, 1);
    save(timeline, site, 1, 1);
  }
  const Timeline::Recorded recorded = timeline->recorded();
  EXPECT_EQ(recorded.events, 3 * (kSaves + 1));
  EXPECT_LE(recorded.kept.size(), 1024u + 4);
  EXPECT_GE(recorded.kept.size(), 512u);
  EXPECT_EQ(recorded.most_plain.plain, 10);
  EXPECT_EQ(recorded.most_plain.site, &peak);
  const auto at = [&](std::int64_t number) {
    return std::count_if(recorded.kept.begin(), recorded.kept.end(),
                         [&](const Timeline::Event& event) { return event.number == number; });
  };
  EXPECT_EQ(at(recorded.most_plain.number), 1);
  EXPECT_EQ(recorded.kept.back().number, recorded.events - 1);
  EXPECT_TRUE(std::is_sorted(recorded.kept.begin(), recorded.kept.end(),
                             [](const auto& a, const auto& b) { return a.number < b.number; }));
}

}  // namespace
}  // namespace backfold::torch_layer
