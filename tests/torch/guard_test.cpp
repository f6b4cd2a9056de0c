// SPDX-License-Identifier: Apache-2.0
//
// The guard's estimate against gradients whose variance is known.

#include "torch/plan/guard.h"

#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/csrc/api/include/torch/autograd.h>
#include <torch/csrc/api/include/torch/types.h>
#include <torch/csrc/api/include/torch/utils.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <limits>
#include <thread>

namespace backfold::torch_layer {
namespace {

using Tensors = std::vector<at::Tensor>;

Tensors parameters_of(const std::vector<std::vector<std::int64_t>>& shapes,
                      at::ScalarType type = at::kFloat) {
  Tensors parameters;
  for (const auto& shape : shapes) parameters.push_back(torch::zeros(shape, type).requires_grad_());
  return parameters;
}

// A backward that hands `gradient` to `parameter`.
void hand(const at::Tensor& parameter, const at::Tensor& gradient) {
  (parameter * gradient).sum().backward();
}

at::Tensor noise_like(const at::Tensor& parameter, double deviation = 1, double mean = 0) {
  return torch::randn(parameter.sizes(), parameter.options().requires_grad(false))
      .mul_(deviation)
      .add_(mean);
}

void run_steps(Guard& guard, const Tensors& parameters, int steps, double deviation = 1,
               double mean = 0) {
  for (int step = 0; step < steps; ++step) {
    guard.begin_step();
    for (const at::Tensor& parameter : parameters)
      hand(parameter, noise_like(parameter, deviation, mean));
  }
}

double count_of(const Tensors& tensors) {
  double count = 0;
  for (const at::Tensor& tensor : tensors) count += static_cast<double>(tensor.numel());
  return count;
}

using Step = std::function<void(Guard&, const Tensors& gradients)>;

// A guard's estimate after 40 steps that get the same gradients in every call.
GradientMoments moments_of(const Tensors& parameters, const Step& step, std::uint64_t seed = 0) {
  torch::manual_seed(1);
  Guard guard(parameters, seed);
  for (int i = 0; i < 40; ++i) {
    Tensors gradients;
    for (const at::Tensor& parameter : parameters) gradients.push_back(noise_like(parameter));
    guard.begin_step();
    step(guard, gradients);
  }
  return guard.moments().value();
}

GradientMoments plain_moments(const Tensors& parameters, std::uint64_t seed = 0) {
  return moments_of(
      parameters,
      [&](Guard&, const Tensors& gradients) {
        for (std::size_t i = 0; i < parameters.size(); ++i) hand(parameters[i], gradients[i]);
      },
      seed);
}

void expect_same(const GradientMoments& one, const GradientMoments& other) {
  EXPECT_EQ(one.variance, other.variance);
  EXPECT_EQ(one.energy, other.energy);
}

TEST(Guard, EstimatesVarianceAndEnergyOfKnownGradients) {
  for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    torch::manual_seed(1);
    const Tensors parameters = parameters_of({{64, 300}, {1'000}, {7}, {}, {32, 16, 3, 3}}, type);
    Guard guard(parameters, 5);
    run_steps(guard, parameters, 120, 2, 3);
    ASSERT_TRUE(guard.moments());
    const double count = count_of(parameters);
    // As good as 392 coordinates of equal weight, and 7 pairs: 5 deviations are
    // 5 * sqrt(2 / (392 * 7)) = 0.135.
    EXPECT_NEAR(guard.moments()->variance / (4 * count), 1, 0.135) << type;
    EXPECT_NEAR(guard.moments()->energy / (13 * count), 1, 0.135) << type;
  }
}

// Among 39 larger parameters, one of five elements has almost all of the variance. Drawn by size, a
// pair would look at it in one of 700 cases. By turns every third pair does, in full, and what is
// left is the noise of its five numbers: 0.63 in a turn, 0.32 in turns that weigh as much as 4
// equal ones.
TEST(Guard, GivesASmallParameterItsFairShare) {
  std::vector<std::vector<std::int64_t>> shapes(40, {50, 31});
  shapes[17] = {5};
  const Tensors parameters = parameters_of(shapes);
  const double truth = 39 * 50 * 31 * 1e-6 + 5;
  constexpr int kGuards = 32;
  double sum = 0, squares = 0;
  for (int seed = 0; seed < kGuards; ++seed) {
    torch::manual_seed(seed);
    Guard guard(parameters, seed);
    for (int step = 0; step < 33; ++step) {
      guard.begin_step();
      for (const at::Tensor& parameter : parameters)
        hand(parameter, noise_like(parameter, parameter.numel() == 5 ? 1 : 1e-3));
    }
    ASSERT_TRUE(guard.moments());
    const double error = guard.moments()->variance / truth - 1;
    sum += error;
    squares += error * error;
  }
  EXPECT_LT(std::abs(sum / kGuards), 4 * 0.32 / std::sqrt(kGuards));
  EXPECT_LT(std::sqrt(squares / kGuards), 0.45);
}

// One column in eight has gradients. A draw from few columns would find none, or far too many.
TEST(Guard, DrawsFromAllColumns) {
  for (const std::int64_t columns : {8, 512, 768, 1'000}) {
    const Tensors parameters = parameters_of({{512, columns}});
    const at::Tensor hot = torch::arange(columns).lt(columns / 8).to(at::kFloat);
    for (int seed = 0; seed < 8; ++seed) {
      torch::manual_seed(seed);
      Guard guard(parameters, seed);
      for (int step = 0; step < 17; ++step) {
        guard.begin_step();
        hand(parameters[0], noise_like(parameters[0]) * hot);
      }
      ASSERT_TRUE(guard.moments());
      // Some 24 draws in 7 pairs: 4 deviations. With a stride of two rows it is 0 or 8.
      EXPECT_NEAR(guard.moments()->variance / (64.0 * columns), 1, 4 * std::sqrt(2.0 / (24 * 7)))
          << columns;
    }
  }
}

TEST(Guard, AMovingMeanIsNoVarianceAndOldStepsFade) {
  torch::manual_seed(1);
  const Tensors parameters = parameters_of({{40, 40}});
  Guard guard(parameters, 0);
  run_steps(guard, parameters, 40, 10);
  for (int step = 0; step < 2'000; ++step) {
    guard.begin_step();
    hand(parameters[0], noise_like(parameters[0], 1, 0.05 * step));  // 100 deviations in all
  }
  ASSERT_TRUE(guard.moments());
  EXPECT_NEAR(guard.moments()->variance / 1'600, 1, 0.1);
}

TEST(Guard, AddsUpTheBackwardsOfAStep) {
  torch::manual_seed(1);
  const Tensors parameters = parameters_of({{30, 40}, {9}});
  Guard guard(parameters, 0);
  for (int step = 0; step < 20; ++step) {
    guard.begin_step();
    for (const at::Tensor& parameter : parameters) {
      const at::Tensor gradient = noise_like(parameter);
      hand(parameter, gradient + 1);
      hand(parameter, -gradient);
    }
  }
  ASSERT_TRUE(guard.moments());
  EXPECT_LT(guard.moments()->variance, 1e-9);  // 1209 or more when only one of them counts
  EXPECT_NEAR(guard.moments()->energy / 1'209, 1, 0.1);
}

TEST(Guard, PassesOverWhatArrivesWhilePausedOrIsOnlyReturned) {
  const Tensors parameters = parameters_of({{30, 40}});
  const at::Tensor& parameter = parameters[0];
  const Step disturbed = [&](Guard& guard, const Tensors& gradients) {
    guard.pause(true);
    hand(parameter, gradients[0] + 5);
    guard.pause(false);
    torch::autograd::grad({(parameter * 7 * gradients[0]).sum()}, {parameter});
    hand(parameter, gradients[0]);
  };
  expect_same(moments_of(parameters, disturbed), plain_moments(parameters));
}

TEST(Guard, CountsABackwardThatNamesItsInputs) {
  const Tensors parameters = parameters_of({{30, 40}});
  const Step named = [&](Guard&, const Tensors& gradients) {
    torch::autograd::backward({(parameters[0] * gradients[0]).sum()}, {}, false, false, parameters);
  };
  expect_same(moments_of(parameters, named), plain_moments(parameters));
}

TEST(Guard, StepsWithoutGradientsDoNotCount) {
  const Tensors parameters = parameters_of({{30, 40}});
  const Step idle = [&](Guard& guard, const Tensors& gradients) {
    guard.begin_step();
    hand(parameters[0], gradients[0]);
  };
  // Idle steps make older ones fade; as steps of their own they would halve the variance.
  EXPECT_NEAR(moments_of(parameters, idle).variance / plain_moments(parameters).variance, 1, 0.15);
}

TEST(Guard, CoordinatesDoNotDependOnTheOrderInMemory) {
  const Tensors parameters = parameters_of({{30, 40}});
  const Step turned = [&](Guard&, const Tensors& gradients) {
    (parameters[0].t() * gradients[0].t().contiguous()).sum().backward();
  };
  expect_same(moments_of(parameters, turned), plain_moments(parameters));
}

TEST(Guard, TakesGradientsFromManyThreads) {
  const Tensors parameters = parameters_of({{64, 64}, {64, 64}, {3'000}, {10}});
  const Step threaded = [&](Guard&, const Tensors& gradients) {
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < parameters.size(); ++i)
      threads.emplace_back([&, i] { hand(parameters[i], gradients[i]); });
    for (std::thread& thread : threads) thread.join();
  };
  expect_same(moments_of(parameters, threaded), plain_moments(parameters));
}

TEST(Guard, TheSeedAloneDecidesWhatIsLookedAt) {
  const Tensors parameters = parameters_of({{64, 64}, {3}, {64, 65}});
  expect_same(plain_moments(parameters, 3), plain_moments(parameters, 3));
  EXPECT_NE(plain_moments(parameters, 3).variance, plain_moments(parameters, 4).variance);
}

TEST(Guard, NonFiniteGradientsDoNotCount) {
  torch::manual_seed(1);
  const Tensors parameters = parameters_of({{30, 40}, {100}});
  Guard guard(parameters, 0);
  for (int step = 0; step < 200; ++step) {
    guard.begin_step();
    for (const at::Tensor& parameter : parameters) {
      at::Tensor gradient = noise_like(parameter);
      if (step % 5 == 0) gradient.fill_(std::numeric_limits<float>::quiet_NaN());
      if (step % 7 == 0) gradient.fill_(std::numeric_limits<float>::infinity());
      hand(parameter, gradient);
    }
  }
  ASSERT_TRUE(guard.moments());
  EXPECT_NEAR(guard.moments()->variance / 1'300, 1, 0.2);
}

TEST(Guard, LeavesSparseGradientsAndFrozenParametersOut) {
  torch::manual_seed(1);
  Tensors parameters = parameters_of({{30, 40}, {10'000, 8}, {50}});
  parameters[2].requires_grad_(false);
  parameters.push_back(torch::zeros({5}, at::kComplexFloat).requires_grad_());
  parameters.push_back(parameters[0] * 2);  // no leaf
  parameters.push_back(parameters[0]);      // a second time
  parameters.emplace_back();
  Guard guard(parameters, 0);
  EXPECT_EQ(guard.state().values.size(),
            Guard({parameters[0], parameters[1]}, 0).state().values.size());
  for (int step = 0; step < 60; ++step) {
    guard.begin_step();
    const at::Tensor index = torch::randint(10'000, {64}, at::kLong);
    const at::Tensor rows = torch::embedding(parameters[1], index, -1, false, /*sparse=*/true);
    (rows.sum() * 100 + (parameters[0] * noise_like(parameters[0])).sum()).backward();
  }
  ASSERT_TRUE(parameters[1].grad().is_sparse());
  ASSERT_TRUE(guard.moments());
  EXPECT_NEAR(guard.moments()->variance / 1'200, 1, 0.25);
}

TEST(Guard, APairWithASparseStepDoesNotCount) {
  const Tensors parameters = parameters_of({{100, 8}});
  const at::Tensor index = torch::arange(100);
  Guard guard(parameters, 0);
  for (int step = 0; step < 21; ++step) {
    guard.begin_step();
    torch::embedding(parameters[0], index, -1, false, /*sparse=*/step % 2 == 1).sum().backward();
    parameters[0].mutable_grad() = at::Tensor();
  }
  EXPECT_FALSE(guard.moments());
}

TEST(Guard, LeavesGradientsAndHooksOfOthersAlone) {
  const Tensors parameters = parameters_of({{64, 64}});
  const at::Tensor& parameter = parameters[0];
  const void* seen = nullptr;
  int calls = 0;
  parameter.register_hook([&](const at::Tensor& gradient) {
    seen = gradient.const_data_ptr();
    ++calls;
  });
  const at::Tensor gradient = noise_like(parameter);
  {
    Guard guard(parameters, 0);
    guard.begin_step();
    hand(parameter, gradient);
    EXPECT_EQ(torch::autograd::impl::hooks(parameter).size(), 2u);
  }
  EXPECT_EQ(calls, 1);
  EXPECT_TRUE(parameter.grad().equal(gradient));
  EXPECT_EQ(parameter.grad().const_data_ptr(), seen);  // taken as it is, not copied
  EXPECT_EQ(torch::autograd::impl::hooks(parameter).size(), 1u);
  hand(parameter, gradient);
  EXPECT_EQ(calls, 2);
}

TEST(Guard, ComesBackWhenAnotherHookDroppedIts) {
  const Tensors parameters = parameters_of({{40, 40}});
  Guard guard(parameters, 0);
  parameters[0].register_hook([](const at::Tensor&) {});
  ASSERT_EQ(torch::autograd::impl::hooks(parameters[0]).size(), 1u);
  run_steps(guard, parameters, 17);
  EXPECT_TRUE(guard.moments());
}

TEST(Guard, GoesOnFromAState) {
  const Tensors parameters = parameters_of(std::vector<std::vector<std::int64_t>>(20, {30, 40}));
  for (const int interruption : {6, 7, 40, 45}) {  // in a dense pair, between two, and later on
    Guard whole(parameters, 3), second(parameters, 3);
    {
      Guard first(parameters, 3);
      for (int step = 0; step < interruption; ++step) {
        first.begin_step();
        run_steps(whole, parameters, 1);
      }
      second.load(first.state());
    }
    for (int step = 0; step < 20; ++step) {
      second.begin_step();
      run_steps(whole, parameters, 1);
    }
    expect_same(whole.moments().value(), second.moments().value());
    EXPECT_EQ(whole.state().counters, second.state().counters);
  }
}

TEST(Guard, RefusesTheStateOfAnother) {
  const Tensors parameters = parameters_of({{30, 40}});
  Guard guard(parameters, 3);
  run_steps(guard, parameters, 12);
  const SketchState before = guard.state();
  EXPECT_THROW(guard.load({}), c10::ValueError);
  EXPECT_THROW(guard.load(Guard(parameters, 4).state()), c10::ValueError);
  EXPECT_THROW(guard.load(Guard(parameters_of({{40, 30}}), 3).state()), c10::ValueError);
  EXPECT_THROW(guard.load(Guard(parameters_of({{30, 40}, {1}}), 3).state()), c10::ValueError);
  SketchState broken = before;
  broken.counters[2] = -1;
  EXPECT_THROW(guard.load(broken), c10::ValueError);
  EXPECT_EQ(guard.state().counters, before.counters);
  EXPECT_EQ(guard.state().values, before.values);
}

TEST(Guard, SaysNothingBeforeItHasSeenEnough) {
  const Tensors parameters = parameters_of({{30, 40}});
  Guard guard(parameters, 0);
  run_steps(guard, parameters, 16);
  EXPECT_FALSE(guard.moments());
  guard.begin_step();
  EXPECT_TRUE(guard.moments());
  Guard empty({}, 0);
  for (int step = 0; step < 20; ++step) empty.begin_step();
  EXPECT_FALSE(empty.moments());
}

std::atomic<int> operators{0};

int operators_in(const std::function<void()>& body) {
  const auto handle =
      at::addGlobalCallback(at::RecordFunctionCallback([](const at::RecordFunction&) {
                              ++operators;
                              return std::unique_ptr<at::ObserverContext>();
                            }).scopes({at::RecordScope::FUNCTION}));
  operators = 0;
  body();
  at::removeCallback(handle);
  return operators;
}

TEST(Guard, RunsNothingBetweenPairsAndLittleInThem) {
  const Tensors parameters = parameters_of(std::vector<std::vector<std::int64_t>>(100, {30, 40}));
  const at::Tensor gradient = noise_like(parameters[0]);
  const auto backward = [&] {
    for (const at::Tensor& parameter : parameters) hand(parameter, gradient);
  };
  backward();  // from now on gradients are added to what is there
  const int plain = operators_in(backward);
  Guard guard(parameters, 0);
  std::vector<int> extra;
  for (int step = 0; step < 64; ++step)
    extra.push_back(operators_in([&] {
                      guard.begin_step();
                      backward();
                    }) -
                    plain);
  EXPECT_EQ(std::count(extra.begin() + 40, extra.end(), 0), 24 / 8 * 5);
  EXPECT_LT(*std::max_element(extra.begin(), extra.end()), 200);  // 600 if all were examined
}

}  // namespace
}  // namespace backfold::torch_layer
