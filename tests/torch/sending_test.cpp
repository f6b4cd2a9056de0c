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
  step.reference.ms_per_sent_byte = 1.0 / kBytes;
  const RemadePlan plan = step.plan(3 * kBytes - 1);
  EXPECT_EQ(step.sent(), "01");
  EXPECT_EQ(plan.sent_bytes, 2 * kBytes);
  EXPECT_EQ(plan.held_bytes, 2 * kBytes);
  EXPECT_EQ(step.plan(4 * kBytes).sent_bytes, 0);
  EXPECT_EQ(step.sent(), "");
}

TEST(Sending, SmallPiecesOldStepsAndWhatWasStuckStay) {
  Step step(5);
  step[0].ledger.saves = 17;  // of 60 KiB each
  step[1].ledger.step = kStep - 1;
  step[2].stuck = true;
  step[3].ledger.kind = Kind::kParameter;
  EXPECT_EQ(sendable(step.sites, kStep), (std::vector<const Site*>{&step[4]}));
}

TEST(Sending, WhatProductsMakeAgainHasNothingToSend) {
  Step step(1);
  step.make_by_product(0, 1);
  const Marked marked{&step[0]};
  EXPECT_EQ(exact_leaving(step[0], {}, kStep), kBytes);
  EXPECT_EQ(exact_leaving(step[0], marked, kStep), 0);
  step[0].ledger.held_bytes = 0;  // the last step made it again already
  step[0].ledger.remade_bytes = kBytes;
  EXPECT_EQ(exact_leaving(step[0], {}, kStep), kBytes);
  EXPECT_EQ(exact_leaving(step[0], marked, kStep), 0);
}

// A bundle of one packet with so many elements.
struct Packet {
  Site site;
  Bundle bundle;

  explicit Packet(std::int64_t elements) {
    site.reference.elements = elements;
    site.reference.packets = 1;
    site.reference.element_bytes = 4;
    site.reference.groups.fill(elements / 128);
    bundle.root = &site;
  }
  std::vector<Option> options() const {
    std::vector<Option> all;
    for (const int bits : {1, 2, 3, 4, 5, 6, 8, 16}) {
      const std::int64_t bytes = bytes_at(site.reference, bits, {});
      all.push_back({{bits, {}}, bytes, bytes, 1.0 / bits});
    }
    return all;
  }
  std::vector<int> widths_that_leave() const {
    std::vector<Option> left = options();
    have_leave(bundle, left);
    std::vector<int> widths;
    for (const Option& option : left) {
      EXPECT_EQ(option.cost, option.bytes - option.leaves);
      if (option.leaves > 0) widths.push_back(option.choice.bits);
    }
    return widths;
  }
};

TEST(Sending, PacketsThatLeaveAreLargeEnoughAndNoWiderThanNeedBe) {
  EXPECT_EQ(Packet(1 << 20).widths_that_leave(), (std::vector<int>{1, 2, 3, 4}));
  EXPECT_EQ(Packet(1 << 18).widths_that_leave(), (std::vector<int>{2, 3, 4}));
  EXPECT_EQ(Packet(1 << 16).widths_that_leave(), (std::vector<int>{8}));
  EXPECT_EQ(Packet(1 << 10).widths_that_leave(), std::vector<int>());
  const Target budget{Target::Kind::kBudget, 1};
  EXPECT_EQ(width_to_send(budget, Packet(1 << 20).bundle, 2), 2);
  EXPECT_EQ(width_to_send(budget, Packet(1 << 16).bundle, 2), 8);
  EXPECT_EQ(width_to_send(budget, Packet(1 << 15).bundle, 2), std::nullopt);
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
