// SPDX-License-Identifier: Apache-2.0
//
// Controller::step: when it measures, what it leaves alone, and how a schedule goes on.

#include <gtest/gtest.h>
#include <torch/csrc/api/include/torch/nn/modules/linear.h>
#include <torch/csrc/api/include/torch/utils.h>

#include <sstream>

#include "backfold/controller.h"
#include "torch/state.h"

namespace backfold {
namespace {

ControllerOptions scheduled(std::vector<std::int64_t> steps) {
  ControllerOptions options;
  options.bits = 3;
  options.min_bytes = 0;
  options.probe_steps = std::move(steps);
  options.probe_every.reset();
  return options;
}

// tanh saves what is foldable: its result.
struct Training {
  explicit Training(ControllerOptions options)
      : model(make_model()), fold(*model, std::move(options)) {}

  static torch::nn::Linear make_model() {
    torch::manual_seed(0);
    return torch::nn::Linear(64, 64);
  }

  at::Tensor loss(double part) {
    parts.push_back(part);
    const auto rows = static_cast<std::int64_t>(part * 64);
    torch::manual_seed(fold.steps());
    return model(torch::randn({64, 64}).narrow(0, 0, rows)).tanh().square().mean();
  }
  void step() {
    model->zero_grad();
    fold.step([&](double part) { return loss(part); });
    const torch::NoGradGuard no_grad;
    for (at::Tensor& parameter : model->parameters()) parameter.sub_(parameter.grad(), 0.1);
  }

  std::vector<double> parts;  // that forward was called with
  torch::nn::Linear model;
  Controller fold;
};

TEST(Step, RunsForwardOnceBetweenTheStepsOfTheSchedule) {
  Training training(scheduled({2}));
  training.step();
  EXPECT_EQ(training.parts, std::vector<double>{1});
  EXPECT_FALSE(training.fold.report().plan);
  training.step();
  EXPECT_EQ(training.parts, (std::vector<double>{1, 1, 0.25, 0.25}));
  ASSERT_TRUE(training.fold.report().plan);
  EXPECT_EQ(training.fold.report().plan->step, 2);
  training.step();
  EXPECT_EQ(training.parts.size(), 5U);
  EXPECT_EQ(training.fold.steps(), 3);
}

TEST(Step, LeavesTheGradientOfTheStepAloneWhereItMeasures) {
  Training measured(scheduled({1})), other(scheduled({}));
  measured.fold.step([&](double part) { return measured.loss(part); });
  other.fold.step([&](double part) { return other.loss(part); });
  EXPECT_GT(measured.parts.size(), other.parts.size());
  for (std::size_t i = 0; i < 2; ++i)
    EXPECT_TRUE(measured.model->parameters()[i].grad().equal(other.model->parameters()[i].grad()));
}

TEST(Step, RunsTheWholeBatchAgainWhereForwardTakesNoPart) {
  Training training(scheduled({1}));
  int calls = 0;
  training.fold.step([&] {
    ++calls;
    return training.loss(1);
  });
  EXPECT_EQ(calls, 3);
  EXPECT_TRUE(training.fold.report().plan);
}

TEST(Step, WithoutReplayMeasuresInTheUsersOwnStep) {
  ControllerOptions options = scheduled({2});  // the first shows what can be folded
  options.replay = false;
  Training training(options);
  training.step();
  training.step();
  EXPECT_FALSE(training.fold.report().plan);
  training.step();  // what the second left to be measured is planned by now
  EXPECT_EQ(training.parts, (std::vector<double>{1, 1, 1}));
  ASSERT_TRUE(training.fold.report().plan);
  EXPECT_EQ(training.fold.report().rows[0].estimate, "signal gain");
}

TEST(Step, ReturnsTheLossAndWantsOneWithAGradient) {
  Training training(scheduled({}));
  const at::Tensor loss = training.fold.step([&] { return training.loss(1); });
  EXPECT_EQ(loss.dim(), 0);
  EXPECT_THROW(training.fold.step([] { return torch::zeros({}); }), c10::ValueError);
  EXPECT_THROW(training.fold.step(std::function<at::Tensor()>()), c10::ValueError);
}

TEST(Step, AForwardThatThrowsLeavesTheControllerUsable) {
  Training training(scheduled({1}));
  EXPECT_THROW(training.fold.step([]() -> at::Tensor { throw std::runtime_error("no batch"); }),
               std::runtime_error);
  training.step();
  EXPECT_TRUE(training.fold.report().plan);
}

TEST(Step, GoesOnBitForBitFromAState) {
  for (const std::int64_t middle : {1, 2, 3}) {
    Training whole(scheduled({2, 4}));
    for (int i = 0; i < middle; ++i) whole.step();
    std::stringstream state;
    whole.fold.save(state);
    Training resumed(scheduled({2, 4}));
    resumed.fold.load(state);
    for (std::size_t i = 0; i < 2; ++i) {
      const torch::NoGradGuard no_grad;
      resumed.model->parameters()[i].copy_(whole.model->parameters()[i]);
    }
    for (std::int64_t i = middle; i < 6; ++i) {
      whole.step();
      resumed.step();
    }
    for (std::size_t i = 0; i < 2; ++i)
      EXPECT_TRUE(whole.model->parameters()[i].equal(resumed.model->parameters()[i])) << middle;
  }
}

}  // namespace
}  // namespace backfold
