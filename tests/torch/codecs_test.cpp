// SPDX-License-Identifier: Apache-2.0
//
// Codecs for chosen places, in a program without Python.

#include "backfold/codecs.h"

#include <ATen/Parallel.h>
#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/csrc/api/include/torch/autograd.h>
#include <torch/csrc/api/include/torch/types.h>
#include <torch/csrc/api/include/torch/utils.h>

#include <atomic>
#include <vector>

#include "backfold/controller.h"
#include "torch/codec/codec.h"

namespace backfold {
namespace {

// What a step keeps of `op`'s first tensor in the part `module`.
std::string kind_of(const Report& report, const std::string& module, const std::string& op) {
  for (const ReportRow& row : report.rows)
    if (row.module == module && row.op == op && row.held_bytes > 0) return row.kind;
  return "nothing";
}

torch::Tensor forward(const torch::Tensor& x) {
  torch::Tensor y = x;
  {
    RECORD_USER_SCOPE("encoder");
    y = torch::gelu(y * 2).tanh();
  }
  {
    RECORD_USER_SCOPE("decoder");
    y = torch::gelu(y * 2).tanh();
  }
  return y.square().sum();
}

void run(Controller& fold, const torch::Tensor& x) {
  for (int step = 0; step < 2; ++step) {
    torch::Tensor loss;
    {
      const auto scope = fold.enter();
      loss = forward(x);
    }
    loss.backward();
  }
}

TEST(Codecs, TheFirstRuleThatMatchesWins) {
  ControllerOptions options;
  options.min_bytes = 0;
  options.derive = false;
  options.codec = {{{.path = "enc*", .op = "aten::gelu"}, codecs::FewBit{3}},
                   {{.path = "encoder"}, codecs::Pool{4}},
                   {{.type = at::kDouble}, codecs::Keep{}},
                   {{.op = "aten::gelu", .min_bytes = 1024}, codecs::PoolResidual{8, 2}}};
  Controller fold(options);
  run(fold, torch::randn({2, 4, 32, 32}).requires_grad_());
  const Report report = fold.report();
  EXPECT_EQ(kind_of(report, "encoder", "aten::gelu"), "few bit");
  EXPECT_EQ(kind_of(report, "encoder", "aten::tanh"), "pooled");
  EXPECT_EQ(kind_of(report, "decoder", "aten::gelu"), "pooled and residual");
  EXPECT_EQ(kind_of(report, "decoder", "aten::tanh"), "lossy");
}

TEST(Codecs, ARuleThatDoesNotFitRaises) {
  ControllerOptions options;
  options.min_bytes = 0;
  options.codec = {{{.op = "aten::tanh"}, codecs::Pool{4}}};
  Controller fold(options);
  EXPECT_THROW(run(fold, torch::randn({64, 64}).requires_grad_()), c10::ValueError);
}

// Of 16 samples two have a gradient that counts. A step whose rounding knows which they are gives
// them the bits: the gradient of the weight is closer to the plain one.
TEST(Codecs, SamplesThatMatterGetTheBits) {
  torch::manual_seed(0);
  const torch::Tensor x = torch::randn({16, 512}), weight = torch::randn({512, 8}).requires_grad_();
  torch::Tensor scale = torch::full({16, 1}, 1e-3);
  scale.slice(0, 0, 2).fill_(1);
  const torch::Tensor ids = torch::arange(100, 116);
  const auto gradient = [&](Controller* fold, bool known) {
    weight.mutable_grad() = torch::Tensor();
    torch::Tensor loss;
    {
      if (fold != nullptr && known) fold->sample_ids(ids, 200);
      std::optional<Controller::Scope> scope;
      if (fold != nullptr) scope.emplace(fold->enter());
      loss = ((x * 1).mm(weight) * scale).sum();  // a product of its own: x itself is alive
    }
    loss.backward();
    return weight.grad().clone();
  };
  const torch::Tensor plain = gradient(nullptr, false);
  double errors[2];
  for (const bool known : {false, true}) {
    ControllerOptions options;
    options.min_bytes = 0;
    options.bits = 2;
    options.codec = {{{.op = "aten::mm"}, codecs::Quantize{2, true}}};
    Controller fold(options);
    gradient(&fold, known);
    fold.calibrate([&] { gradient(&fold, known); });
    errors[known] = 0;
    for (int step = 0; step < 20; ++step)
      errors[known] += (gradient(&fold, known) - plain).square().sum().item<double>();
  }
  EXPECT_LT(errors[true], 0.5 * errors[false]);
}

TEST(Codecs, SampleIdsAreChecked) {
  Controller fold;
  EXPECT_THROW(fold.sample_ids(torch::ones({2}), 4), c10::TypeError);
  EXPECT_THROW(fold.sample_ids(torch::arange(5), 4), c10::ValueError);
  EXPECT_THROW(fold.sample_ids(torch::arange(1), 0), c10::ValueError);
}

TEST(Codecs, BadArgumentsAreRefused) {
  ControllerOptions options;
  options.codec = {{{}, codecs::Quantize{7}}};
  EXPECT_THROW(Controller{options}, c10::ValueError);
  options.codec = {{{.op = "gelu"}, codecs::Keep{}}};
  EXPECT_THROW(Controller{options}, c10::ValueError);
  options.codec = {{{.path = "block["}, codecs::Keep{}}};
  EXPECT_THROW(Controller{options}, c10::ValueError);
  options.codec.clear();
  options.menu = {codecs::Pool{4}};
  EXPECT_THROW(Controller{options}, c10::ValueError);
}

TEST(Codecs, ShareWorkOnTheThreadsOfTorch) {
  const int before = at::get_num_threads();
  at::set_num_threads(2);
  const Execution outside = torch_layer::execution_on(at::kCPU);
  EXPECT_EQ(outside.threads, 2);
  ASSERT_NE(outside.executor, nullptr);
  std::vector<int> visits(5);
  std::atomic<int> inside_of_region = 0, threads_inside = 0;
  const auto visit = [&](int part) {
    ++visits[static_cast<std::size_t>(part)];
    inside_of_region += at::in_parallel_region();
    threads_inside += torch_layer::execution_on(at::kCPU).threads;
  };
  outside.executor(
      5, [](void* context, int part) { (*static_cast<decltype(visit)*>(context))(part); },
      const_cast<void*>(static_cast<const void*>(&visit)));
  EXPECT_EQ(visits, std::vector<int>(5, 1));
  EXPECT_EQ(inside_of_region, 5);
  EXPECT_EQ(threads_inside, 5) << "regions are not nested";
  at::set_num_threads(before);
}

TEST(Codecs, AreWrittenAsPythonWritesThem) {
  EXPECT_EQ(describe(codecs::RunningRange{8, 0.9}), "RunningRange(bits=8, decay=0.9)");
  EXPECT_EQ(describe(codecs::Quantize{2, true}), "Quantize(bits=2, per_sample=True)");
  EXPECT_TRUE(is_biased(codecs::Pool{}) && is_biased(codecs::FewBit{}));
  EXPECT_FALSE(is_biased(codecs::Project{}));
}

}  // namespace
}  // namespace backfold
