// SPDX-License-Identifier: Apache-2.0

#include "torch/plan/limits.h"

#include <gtest/gtest.h>

#include "torch/plan/moments.h"

namespace backfold::torch_layer {
namespace {

// Three tensors of a step with three moments: the turn to backward, and after each read. The first
// layer's stays longest.
struct Step {
  std::deque<Site> sites{3};
  std::vector<Bundle> bundles;

  Step() {
    for (int i = 0; i < 3; ++i) {
      sites[static_cast<std::size_t>(i)].stay = {0, 2 - i, 3 - i};
      Bundle bundle;
      bundle.root = &sites[static_cast<std::size_t>(i)];
      bundles.push_back(bundle);
    }
  }
};

// Each byte less adds as much error as the next.
PlanSite menu() { return {{{10, 9}, {20, 4}, {40, 1}, {80, 0}}}; }
std::vector<std::int64_t> bytes_of(const std::vector<PlanSite>& menus, const std::vector<int>& c) {
  std::vector<std::int64_t> bytes;
  for (std::size_t i = 0; i < c.size(); ++i)
    bytes.push_back(menus[i].options[static_cast<std::size_t>(c[i])].bytes);
  return bytes;
}

TEST(Limits, OneLimitIsABudget) {
  const std::vector<PlanSite> menus(3, menu());
  const Limits limits(3, 60);
  EXPECT_EQ(limits.choose(menus), (std::vector<int>{1, 1, 1}));
  EXPECT_EQ(limits.excess({30, 30, 30}).bytes, 30);
  EXPECT_FALSE(Limits(3, 29).choose(menus));
}

TEST(Limits, TensorsThatAreGoneAtTheTightestMomentTakeWhatTheyLike) {
  const Step step;
  const std::vector<PlanSite> menus(3, menu());
  // The last moment finds the first tensor alone, and most is taken besides.
  const Limits limits(step.bundles, {200, 200, 20});
  const auto choice = limits.choose(menus);
  ASSERT_TRUE(choice);
  EXPECT_EQ(bytes_of(menus, *choice), (std::vector<std::int64_t>{20, 80, 80}));
  EXPECT_LE(limits.excess(bytes_of(menus, *choice)).bytes, 0);
}

TEST(Limits, EveryMomentIsKept) {
  const Step step;
  const std::vector<PlanSite> menus(3, menu());
  for (std::int64_t turn = 30; turn <= 240; turn += 10)
    for (std::int64_t first = 20; first <= turn; first += 10)
      for (std::int64_t last = 10; last <= first; last += 10) {
        const Limits limits(step.bundles, {turn, first, last});
        const auto choice = limits.choose(menus);
        ASSERT_TRUE(choice) << turn << ' ' << first << ' ' << last;
        EXPECT_LE(limits.excess(bytes_of(menus, *choice)).bytes, 0)
            << turn << ' ' << first << ' ' << last;
      }
}

TEST(Limits, SayWhereTheyAreExceededMost) {
  const Step step;
  const Limits limits(step.bundles, {100, 50, 5});
  const Limits::Excess excess = limits.excess({10, 10, 10});
  EXPECT_EQ(excess.bytes, 5);
  EXPECT_EQ(excess.moment, 2);
  EXPECT_FALSE(limits.choose(std::vector<PlanSite>(3, menu())));
}

TEST(Limits, WhatIsUnfoldedTakesNothingMoreOnceItIsRead) {
  const Step step;
  EXPECT_EQ(Limits(step.bundles, {100, 15, 15}).excess({5, 90, 5}).bytes, 80);
  const Limits limits(step.bundles, {100, 15, 15}, {step.bundles[1].root});
  EXPECT_EQ(limits.excess({5, 90, 5}).moment, 0);
  EXPECT_EQ(limits.excess({5, 90, 5}).bytes, 0);
}

TEST(Moments, KeepThoseThatMatter) {
  const auto timeline = std::make_shared<Timeline>();
  SiteTable table;
  Operator op;
  op.name = "op";
  op.slots = {"a", "b"};
  Site& first = table.site(0, op, 0, 0);
  Site& last = table.site(0, op, 1, 0);
  timeline->begin(1, true);
  {
    Charge a(timeline, first, Timeline::Curve::kHeld, 100);
    timeline->saved(first);
    Charge b(timeline, last, Timeline::Curve::kHeld, 60);
    timeline->saved(last);
    timeline->end_block();
    timeline->read(last, 500);
    b.end();
    timeline->read(first, 0);
  }
  for (Site* site : {&first, &last}) {
    site->ledger.step = 1;
    site->ledger.lossy.elements = 1;
  }
  first.ledger.held_bytes = 100;
  last.ledger.held_bytes = 60;
  StepReference reference;
  note_moments(table, timeline->watched(), reference);
  // Before the first read, and at it: later ones have less of everything.
  EXPECT_EQ(reference.moments, (std::vector<std::int64_t>{0, 500}));
  EXPECT_EQ(last.stay.from, 0);
  EXPECT_EQ(last.stay.read, 1);
  EXPECT_EQ(last.stay.until, 2);
  const Target target{Target::Kind::kPeak, 1000};
  EXPECT_EQ(headroom(reference, target), 500);
  EXPECT_EQ(left_for_packets(table, reference, target, {}), (std::vector<std::int64_t>{1000, 500}));
}

}  // namespace
}  // namespace backfold::torch_layer
