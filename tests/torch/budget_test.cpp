// SPDX-License-Identifier: Apache-2.0
//
// A budget that is kept by offloading, with copies that never end by themselves.

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/csrc/api/include/torch/types.h>

#include "backfold/controller.h"
#include "fake_backing.h"
#include "torch/offload/offloader.h"
#include "torch/state.h"

namespace backfold {
namespace {

constexpr std::int64_t kBudget = 1 << 20;
constexpr std::int64_t kPacket = 500'000;  // at least, of those that leave: 4 bits

// Packets alone: not even 1 bit everywhere would keep the budget.
struct Training {
  Training() : fold(options()) {
    step();  // tells what a step saves
    fold.state().offloader = std::make_shared<torch_layer::Offloader>([this](const at::Device&) {
      auto made = std::make_unique<torch_layer::FakeBacking>(std::size_t{1} << 30);
      backing = made.get();
      return made;
    });
  }
  static ControllerOptions options() {
    ControllerOptions options;
    options.budget = kBudget;
    options.derive = false;
    options.probe_steps = {};
    options.probe_every.reset();
    return options;
  }
  // The report at the end of the block, `at_end` having run as its last.
  Report step(const std::function<void()>& at_end = [] {}) {
    at::Tensor y = x;
    {
      const auto scope = fold.enter();
      for (int i = 0; i < 12; ++i) y = y.tanh();
      at_end();
    }
    Report report = fold.report();
    y.sum().backward();
    return report;
  }

  at::Tensor x = at::randn({1024, 1024}).requires_grad_();
  torch_layer::FakeBacking* backing = nullptr;
  Controller fold;
};

TEST(Budget, IsKeptAtTheEndOfTheBlockThoughNoCopyEndsByItself) {
  Training training;
  for (int i = 0; i < 4; ++i) {
    const Report report = training.step();
    EXPECT_LE(report.held_bytes, kBudget) << i;  // two packets more if nothing waited
    EXPECT_GT(report.offloaded_bytes, 3 * kPacket) << i;
  }
}

TEST(Budget, OfCopiesUnderWayLeavesAloneWhatFits) {
  Training training;
  training.step();
  std::size_t leaving = 0;
  double& budget = training.fold.state().planning.target->value;
  const Report report = training.step([&] {
    leaving = training.backing->under_way();
    budget += 1.5 * kPacket;
  });
  EXPECT_EQ(leaving, 2u);
  EXPECT_LE(report.held_bytes, static_cast<std::int64_t>(budget));
  EXPECT_GT(report.held_bytes, kBudget);  // no more if both had to end
}

TEST(Budget, CountsAsHeldWhatCouldNotLeave) {
  Training training;
  training.step();
  training.backing->fails_to_write = true;
  EXPECT_GT(training.step().held_bytes, kBudget);
  training.backing->fails_to_write = false;
  // No plan goes without them: the next one is impossible, where it would be made as before if
  // copies that failed counted as gone.
  EXPECT_THROW(training.step(), c10::ValueError);
}

}  // namespace
}  // namespace backfold
