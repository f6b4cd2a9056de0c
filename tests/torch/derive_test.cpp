// SPDX-License-Identifier: Apache-2.0
//
// Tensors that are made again, in a program without Python.

#include <gtest/gtest.h>
#include <torch/csrc/api/include/torch/autograd.h>
#include <torch/csrc/api/include/torch/utils.h>

#include <algorithm>

#include "backfold/controller.h"

namespace backfold {
namespace {

ControllerOptions options_with(std::optional<double> bits, bool derive) {
  ControllerOptions options;
  options.bits = bits;
  options.min_bytes = 0;
  options.adaptive = false;
  options.derive = derive;
  return options;
}

struct Layer {
  torch::Tensor in = torch::randn({64, 128}).requires_grad_();
  torch::Tensor wide = torch::randn({128, 512}).mul(0.1).requires_grad_();
  torch::Tensor narrow = torch::randn({512, 128}).mul(0.1).requires_grad_();
  torch::Tensor shift = torch::zeros({128}).requires_grad_();

  torch::Tensor loss() const {
    const torch::Tensor normal = torch::layer_norm(in * 2, {128}, {}, shift);
    return torch::gelu(normal.matmul(wide)).matmul(narrow).square().mean();
  }

  std::vector<torch::Tensor> gradients(Controller* fold) const {
    torch::Tensor out;
    {
      std::optional<Controller::Scope> scope;
      if (fold) scope.emplace(fold->enter());
      out = loss();
    }
    return torch::autograd::grad({out}, {in, wide, narrow, shift});
  }
};

TEST(Derive, ExactlyWithHalfTheMemory) {
  torch::manual_seed(0);
  const Layer layer;
  const auto plain = layer.gradients(nullptr);
  Controller fold(options_with(std::nullopt, true)), stored(options_with(std::nullopt, false));
  const auto derived = layer.gradients(&fold);
  layer.gradients(&stored);
  for (std::size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(derived[i].equal(plain[i]));
  EXPECT_LT(fold.report().held_bytes, 0.6 * static_cast<double>(stored.report().held_bytes));
}

TEST(Derive, TheReportSaysFromWhat) {
  torch::manual_seed(0);
  const Layer layer;
  Controller fold(options_with(4, true));
  layer.gradients(&fold);
  const Report report = fold.report();
  const auto row = std::find_if(report.rows.begin(), report.rows.end(), [](const ReportRow& one) {
    return one.kind == "derived" && one.recipe == "gelu";
  });
  ASSERT_NE(row, report.rows.end());
  EXPECT_NE(row->source.find("aten::gelu/self"), std::string::npos) << row->source;
  EXPECT_GT(row->moved_bytes, row->saved_bytes);
  EXPECT_EQ(row->bits, 4);
}

TEST(Derive, TheReportSaysWhatItSpares) {
  torch::manual_seed(0);
  const Layer layer;
  Controller fold(options_with(4, true)), stored(options_with(4, false));
  layer.gradients(&fold);
  layer.gradients(&stored);
  const Report report = fold.report();
  EXPECT_EQ(report.held_bytes + report.spared_bytes, stored.report().held_bytes);
  double sum = 0;
  for (const ReportRow& row : report.rows) {
    EXPECT_EQ(row.spared_ms != 0, row.kind == "derived") << row.op;
    sum += row.spared_ms;
  }
  EXPECT_DOUBLE_EQ(report.spared_ms, sum);
  EXPECT_NE(report.text().find(" MiB less held"), std::string::npos);
  EXPECT_EQ(stored.report().spared_bytes, 0);
}

TEST(Derive, AParameterThatChangedIsNoSource) {
  torch::manual_seed(0);
  const Layer layer;
  Controller fold(options_with(std::nullopt, true));
  torch::Tensor out;
  {
    const auto scope = fold.enter();
    out = layer.loss();
  }
  {
    const torch::NoGradGuard no_grad;
    layer.shift.add_(1);  // which no node has saved
  }
  try {
    out.backward();
    FAIL() << "a norm's result was made again with another bias";
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("modified in place before backward"),
              std::string::npos);
  }
}

}  // namespace
}  // namespace backfold
