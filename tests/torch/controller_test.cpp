// SPDX-License-Identifier: Apache-2.0
//
// The controller in a program without Python: the engine route.

#include "backfold/controller.h"

#include <gtest/gtest.h>
#include <torch/csrc/api/include/torch/autograd.h>
#include <torch/csrc/api/include/torch/nn/modules/linear.h>
#include <torch/csrc/api/include/torch/utils.h>

#include <algorithm>
#include <thread>

namespace backfold {
namespace {

ControllerOptions options_with(std::optional<double> bits) {
  ControllerOptions options;
  options.bits = bits;
  options.min_bytes = 0;
  return options;
}

const ReportRow* row_of(const Report& report, const std::string& op) {
  for (const ReportRow& row : report.rows)
    if (row.op == op) return &row;
  return nullptr;
}

// Gradient of sum(r * r), r = relu(x w), with respect to w; x and r die before backward.
torch::Tensor gradient(Controller* fold, const torch::Tensor& weight) {
  torch::Tensor loss;
  {
    std::optional<Controller::Scope> scope;
    if (fold) scope.emplace(fold->enter());
    torch::manual_seed(1);
    const torch::Tensor x = torch::randn({64, weight.size(0)}).mul(2);
    const torch::Tensor r = torch::relu(x.matmul(weight));
    loss = (r * r).sum();
  }
  return torch::autograd::grad({loss}, {weight})[0];
}

TEST(Controller, ExactFoldingLeavesGradientsBitwise) {
  const torch::Tensor weight = torch::randn({256, 64}).requires_grad_();
  Controller fold(options_with(std::nullopt));
  const torch::Tensor plain = gradient(nullptr, weight);
  for (int step = 0; step < 3; ++step) EXPECT_TRUE(gradient(&fold, weight).equal(plain));
  EXPECT_EQ(fold.steps(), 3);
}

TEST(Controller, FourBitsGiveANoisyGradientAndHoldLess) {
  const torch::Tensor weight =
      torch::randn({1024, 256}).requires_grad_();  // small tensors have 8 bits at first
  Controller fold(options_with(4));
  const torch::Tensor plain = gradient(nullptr, weight);
  const torch::Tensor folded = gradient(&fold, weight);
  const double error = ((folded - plain).norm() / plain.norm()).item<double>();
  EXPECT_GT(error, 0.0);  // 0 would mean that nothing was packed
  EXPECT_LT(error, 0.3);
  const Report report = fold.report();
  EXPECT_LT(report.held_bytes * 4, report.unique_bytes);
  ASSERT_NE(row_of(report, "aten::mm"), nullptr);
  EXPECT_EQ(row_of(report, "aten::mm")->kind, "lossy");
}

TEST(Controller, OffloadingLeavesGradientsBitwise) {
  const torch::Tensor weight = torch::randn({4096, 64}).requires_grad_();
  for (const std::optional<double> bits : {std::optional<double>(), std::optional<double>(4)}) {
    ControllerOptions options = options_with(bits);
    options.adaptive = false;
    Controller here(options);
    options.offload = true;
    Controller away(options);
    torch::Tensor loss;
    for (int step = 0; step < 3; ++step) {
      {
        const auto scope = away.enter();
        torch::manual_seed(1);
        const torch::Tensor x = torch::randn({64, weight.size(0)}).mul(2);
        const torch::Tensor r = torch::relu(x.matmul(weight));
        loss = (r * r).sum();
      }
      // The first step does not know what is asked for first; later, this is all there is, and
      // stays.
      while (step == 0 && away.report().offloaded_bytes == 0) std::this_thread::yield();
      EXPECT_TRUE(torch::autograd::grad({loss}, {weight})[0].equal(gradient(&here, weight)));
    }
    EXPECT_EQ(here.report().offloaded_bytes, 0);
  }
}

// Gradient through 16 products whose results take a megabyte each.
torch::Tensor gradient_of_chain(Controller* fold, const torch::Tensor& weight) {
  torch::Tensor loss;
  {
    std::optional<Controller::Scope> scope;
    if (fold) scope.emplace(fold->enter());
    torch::manual_seed(1);
    torch::Tensor x = torch::randn({1024, weight.size(0)}).mul(2);
    for (int layer = 0; layer < 16; ++layer) x = x.matmul(weight);
    loss = (x * x).sum();
  }
  return torch::autograd::grad({loss}, {weight})[0];
}

TEST(Controller, ABudgetOffloadsWhatItIsNotKeptWithout) {
  const torch::Tensor weight = (torch::randn({256, 256}) / 16).requires_grad_();
  const torch::Tensor plain = gradient_of_chain(nullptr, weight);
  ControllerOptions options = options_with(std::nullopt);
  options.budget = parse_bytes("1.5MiB");
  Controller fold(options);
  for (int step = 0; step < 4; ++step)
    EXPECT_TRUE(gradient_of_chain(&fold, weight).equal(plain)) << "step " << step;
  const Report report = fold.report();
  ASSERT_TRUE(report.remade);
  EXPECT_GT(report.remade->sent_bytes, 0);
  EXPECT_LE(report.remade->held_bytes, *options.budget);
  options.offload = false;
  Controller here(options);
  gradient_of_chain(&here, weight);
  EXPECT_THROW(gradient_of_chain(&here, weight), c10::ValueError);
}

TEST(Controller, ParametersOfTheModelAreNotPacked) {
  torch::nn::Linear model(256, 256);
  model->weight.requires_grad_(false);  // frozen: only the model says that it is a parameter
  Controller fold(*model, options_with(4));
  torch::Tensor loss;
  {
    const auto scope = fold.enter();
    loss = model(torch::randn({8, 256}).requires_grad_() * 2).sum();
  }
  loss.backward();
  const Report report = fold.report();
  const bool kept = std::any_of(report.rows.begin(), report.rows.end(),
                                [](const ReportRow& row) { return row.kind == "parameter"; });
  EXPECT_TRUE(kept);
}

TEST(Controller, RegionsNameSitesAndKeepThem) {
  ControllerOptions options = options_with(4);
  options.keep = {"dec*"};
  options.derive = false;
  Controller fold(options);
  torch::Tensor loss;
  {
    const auto scope = fold.enter();
    torch::Tensor x = torch::randn({64, 256}).requires_grad_() * 2;
    {
      RECORD_USER_SCOPE("encoder");
      x = x.tanh();
    }
    RECORD_USER_SCOPE("decoder");
    loss = x.sigmoid().sum();
  }
  loss.backward();
  const Report report = fold.report();
  ASSERT_NE(row_of(report, "aten::tanh"), nullptr);
  EXPECT_EQ(row_of(report, "aten::tanh")->module, "encoder");
  EXPECT_EQ(row_of(report, "aten::tanh")->kind, "lossy");
  ASSERT_NE(row_of(report, "aten::sigmoid"), nullptr);
  EXPECT_EQ(row_of(report, "aten::sigmoid")->module, "decoder");
  EXPECT_EQ(row_of(report, "aten::sigmoid")->kind, "passed");
}

TEST(Controller, IsEnteredOnceAtATime) {
  Controller fold;
  const auto scope = fold.enter();
  EXPECT_THROW((void)fold.enter(), c10::Error);
  std::thread([&] { EXPECT_THROW((void)fold.enter(), c10::Error); }).join();
}

TEST(Controller, RefusesBadOptions) {
  EXPECT_THROW(Controller(options_with(17)), c10::ValueError);
  EXPECT_THROW(Controller(options_with(0.5)), c10::ValueError);
  ControllerOptions options = options_with(3.5);
  Controller{options};
  options.adaptive = false;
  EXPECT_THROW(Controller{options}, c10::ValueError);
  options = {.ratio = 1};
  EXPECT_THROW(Controller{options}, c10::ValueError);
  options = {.ratio = 8, .budget = 1 << 20};
  EXPECT_THROW(Controller{options}, c10::ValueError);
  options = {.min_bytes = -1};
  EXPECT_THROW(Controller{options}, c10::ValueError);
}

// Two layers whose inputs differ a hundredfold in what their rounding does to the gradient.
struct Uneven : torch::nn::Module {
  Uneven() {
    first = register_module("first", torch::nn::Linear(256, 256));
    second = register_module("second", torch::nn::Linear(256, 256));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return second(torch::tanh(first(x * 1.0)) * 10).square().mean();
  }
  torch::nn::Linear first = nullptr, second = nullptr;
};

TEST(Controller, CalibratesAndPlans) {
  torch::manual_seed(0);
  Uneven model;
  const torch::Tensor x = torch::randn({128, 256});
  Controller fold(model, options_with(3.5));
  const auto step = [&] { model.forward(x).backward(); };
  std::vector<torch::Tensor> before;
  for (const auto& parameter : model.parameters()) before.push_back(parameter.clone());
  const torch::Tensor generator = at::globalContext().defaultGenerator(at::kCPU).get_state();
  fold.calibrate(step);
  EXPECT_TRUE(at::globalContext().defaultGenerator(at::kCPU).get_state().equal(generator));
  for (std::size_t i = 0; i < before.size(); ++i) {
    EXPECT_TRUE(model.parameters()[i].equal(before[i]));
    EXPECT_FALSE(model.parameters()[i].grad().defined());
  }
  torch::Tensor loss;
  {
    const auto scope = fold.enter();
    loss = model.forward(x);
  }
  loss.backward();
  const Report report = fold.report();
  ASSERT_TRUE(report.plan);
  EXPECT_GE(report.plan->sites, 3);
  EXPECT_LE(report.plan->mean_bits, 3.5);
  EXPECT_LT(report.plan->error, report.plan->uniform_error);
  EXPECT_NEAR(report.plan->held_bytes, report.held_bytes, 0.01 * report.held_bytes);
}

TEST(Controller, CalibrateUndoesWhatAStepWritesToParameters) {
  Uneven model;
  const torch::Tensor x = torch::randn({128, 256});
  torch::Tensor weight = model.parameters()[0];
  const torch::Tensor before = weight.clone();
  Controller fold(model, options_with(3.5));
  fold.calibrate([&] {
    {
      const torch::NoGradGuard no_grad;
      weight.mul_(0.9);
    }
    model.forward(x).backward();
  });
  EXPECT_TRUE(weight.equal(before));
}

TEST(Controller, CalibrateWantsBackward) {
  Uneven model;
  const torch::Tensor x = torch::randn({128, 256});
  Controller fold(model, options_with(3));
  EXPECT_THROW(fold.calibrate([&] { model.forward(x); }), c10::ValueError);
  EXPECT_FALSE(fold.report().plan);
  Controller exact(model, options_with(std::nullopt));
  EXPECT_THROW(exact.calibrate([] {}), c10::Error);
}

TEST(Controller, ModifiedTensorsRaise) {
  Controller fold(options_with(4));
  torch::Tensor loss, y;
  {
    const auto scope = fold.enter();
    y = torch::randn({64, 256}).requires_grad_().mul(2).tanh();
    loss = y.sum();
  }
  y.add_(1);
  EXPECT_THROW(loss.backward(), c10::Error);
}

TEST(Controller, NothingHappensOutsideOfScopes) {
  Controller fold(options_with(1));
  { const auto scope = fold.enter(); }
  const torch::Tensor weight = torch::randn({256, 64}).requires_grad_();
  EXPECT_TRUE(gradient(nullptr, weight).equal(gradient(nullptr, weight)));
  EXPECT_EQ(fold.steps(), 0);
}

}  // namespace
}  // namespace backfold
