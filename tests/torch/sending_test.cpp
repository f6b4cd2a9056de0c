// SPDX-License-Identifier: Apache-2.0

#include "torch/plan/sending.h"

#include <gtest/gtest.h>

#include "torch/plan/exact_plan.h"

namespace backfold::torch_layer {
namespace {

constexpr std::int64_t kStep = 3, kBytes = 1 << 20;

// Places that each hold exact tensors of a megabyte.
struct Step {
  SiteTable sites;
  StepReference reference;

  explicit Step(int places) {
    static const Operator& op = *[] {
      auto* made = new Operator;
      made->name = "aten::mul";
      made->slots = {"self"};
      return made;
    }();
    for (int i = 0; i < places; ++i) {
      Site& site = sites.site(0, op, 0, i);
      site.ledger.step = kStep;
      site.ledger.saves = 1;
      site.ledger.kind = Kind::kRaw;
      site.ledger.held_bytes = kBytes;
    }
    reference.saved_bytes = reference.fixed_bytes = places * kBytes;
    reference.unique_bytes = 8 * places * kBytes;  // an eighth may be made on the way to one tensor
  }

  Site& operator[](int place) { return sites.sites()[static_cast<std::size_t>(place)]; }
  // A product makes that place's tensor in so many milliseconds.
  void make_by_product(int place, double ms) {
    Site& site = (*this)[place];
    site.first_saver = &site;
    site.remaking.emplace();
    site.remaking->step = kStep;
    site.remaking->bytes = kBytes;
    site.remaking->exact = true;
    site.remaking->ms = ms;
    site.remaking->product = place + 1;
  }
  RemadePlan plan(std::int64_t budget) {
    return plan_exactly(sites, reference, {Target::Kind::kBudget, static_cast<double>(budget)},
                        kStep);
  }
  std::string sent() const { return listed(&Site::sent); }
  std::string remade() const { return listed(&Site::remade); }

 private:
  std::string listed(bool Site::*mark) const {
    std::string places;
    for (const Site& site : sites.sites())
      if (site.*mark) places += static_cast<char>('0' + site.occurrence);
    return places;
  }
};

TEST(Sending, WhatIsSavedFirstLeavesFirstAndNoMoreThanNeeded) {
  Step step(4);
  const Sendable sendable(step.sites, {}, kStep);
  EXPECT_EQ(sendable.bytes(), 4 * kBytes);
  EXPECT_EQ(sendable.let_leave(step.sites, kBytes + 1), 2 * kBytes);
  EXPECT_EQ(step.sent(), "01");
  EXPECT_EQ(sendable.let_leave(step.sites, 0), 0);
  EXPECT_EQ(step.sent(), "");
}

TEST(Sending, SmallPiecesOldStepsAndWhatWasStuckStay) {
  Step step(5);
  step[0].ledger.saves = 17;  // of 60 KiB each
  step[1].ledger.step = kStep - 1;
  step[2].stuck = true;
  step[3].ledger.kind = Kind::kParameter;
  const Sendable sendable(step.sites, {}, kStep);
  EXPECT_EQ(sendable.let_leave(step.sites, 5 * kBytes), kBytes);
  EXPECT_EQ(step.sent(), "4");
}

TEST(Sending, WhatProductsMakeAgainHasNothingToSend) {
  Step step(2);
  step.make_by_product(0, 1);
  EXPECT_EQ(Sendable(step.sites, {&step[0]}, kStep).bytes(), kBytes);
  EXPECT_EQ(Sendable(step.sites, {}, kStep).bytes(), 2 * kBytes);
  step[0].ledger.held_bytes = 0;  // the last step made it again already
  step[0].ledger.remade_bytes = kBytes;
  EXPECT_EQ(Sendable(step.sites, {&step[0]}, kStep).bytes(), kBytes);
  EXPECT_EQ(Sendable(step.sites, {}, kStep).bytes(), 2 * kBytes);
}

TEST(Sending, WhatTakesLessTimeForItsBytesComesFirst) {
  Step step(4);
  step.make_by_product(1, 0.1);
  step.make_by_product(2, 10);
  step.reference.ms_per_sent_byte = 1.0 / kBytes;
  const RemadePlan plan = step.plan(kBytes + kBytes / 2);
  EXPECT_EQ(step.remade(), "1");
  EXPECT_EQ(step.sent(), "02");
  EXPECT_EQ(plan.sent_bytes, 2 * kBytes);
  EXPECT_EQ(plan.held_bytes, kBytes);
}

TEST(Sending, AProductRunsInsteadOfWhatCannotLeave) {
  Step step(3);
  step.make_by_product(1, 10);
  step[1].stuck = true;
  step.reference.ms_per_sent_byte = 1.0 / kBytes;
  step.plan(0);
  EXPECT_EQ(step.remade(), "1");
  EXPECT_EQ(step.sent(), "02");
}

TEST(Sending, NothingLeavesWithoutALinkOrForARatio) {
  Step step(2);
  EXPECT_THROW(step.plan(kBytes), c10::ValueError);
  step.reference.ms_per_sent_byte = 1.0 / kBytes;
  EXPECT_THROW(plan_exactly(step.sites, step.reference, {Target::Kind::kRatio, 100.0}, kStep),
               c10::ValueError);
  EXPECT_EQ(step.plan(kBytes).sent_bytes, kBytes);
}

TEST(Sending, TheLowestBudgetIsWhatCannotLeave) {
  Step step(4);
  step[1].stuck = true;
  step.reference.ms_per_sent_byte = 1.0 / kBytes;
  try {
    step.plan(kBytes / 2);
    FAIL() << "a budget below what is stuck was taken";
  } catch (const c10::ValueError& error) {
    const std::string text = error.what_without_backtrace();
    EXPECT_NE(text.find("and all leaves that can"), std::string::npos) << text;
    EXPECT_NE(text.find("budget=524288 bytes cannot be met"), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace backfold::torch_layer
