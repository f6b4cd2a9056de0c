// SPDX-License-Identifier: Apache-2.0
//
// How errors count, leaf by leaf, and the gradients that tell.

#include "torch/probe/leaf_weights.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/variable.h>

#include <cmath>
#include <limits>

namespace backfold::torch_layer {
namespace {

constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

std::vector<double> weights_of(const std::vector<LeafEnergy>& leaves) {
  return LeafWeights().of(leaves);
}

TEST(LeafWeights, CountAnErrorInRelationToTheGradientOfItsLeaf) {
  // The same energy for each element, so that nothing but the size of leaves differs.
  const auto weights = weights_of({{10, 10}, {1000, 1000}});
  EXPECT_NEAR(10 * weights[0], 1000 * weights[1], 1e-9);  // 1 and 100 if every leaf counts 1
}

TEST(LeafWeights, LeaveTheEnergyOfTheGradientWhatItIs) {
  const std::vector<LeafEnergy> leaves = {{3, 100}, {0.01, 5}, {700, 1}, {0, 64}};
  const auto weights = weights_of(leaves);
  double energy = 0;
  for (std::size_t i = 0; i < leaves.size(); ++i) energy += weights[i] * leaves[i].energy;
  EXPECT_NEAR(energy, 703.01, 1e-6);
}

TEST(LeafWeights, KeepALeafWithHardlyAnyGradientFromCountingMoreThanOthers) {
  // A bias in front of a norm: its gradient is rounding noise. By energy alone it would count 1e12
  // times as much as the bias beside it.
  const auto weights = weights_of({{1, 64}, {1, 64}, {1e-12, 64}});
  EXPECT_GT(weights[2], weights[0]);
  EXPECT_LE(weights[2], 2 * weights[0]);
}

TEST(LeafWeights, TakeAnUnknownEnergyForTheMedian) {
  const auto weights = weights_of({{1, 10}, {2, 10}, {4, 10}, {kUnknown, 10}});
  EXPECT_DOUBLE_EQ(weights[3], weights[1]);
}

TEST(LeafWeights, AreOneWhereNothingIsKnown) {
  EXPECT_EQ(weights_of({{0, 10}, {kUnknown, 3}}), (std::vector<double>{1, 1}));
  EXPECT_EQ(LeafWeights().of(at::ones({3})), 1);
}

TEST(LeafWeights, KnowLeavesByTheirMemory) {
  const at::Tensor small = at::ones({2}).requires_grad_(), large = at::ones({8}).requires_grad_();
  const LeafWeights weights({small, large}, {1, 100});
  const auto expected = weights_of({{1, 2}, {100, 8}, {kUnknown, 5}});
  EXPECT_DOUBLE_EQ(weights.of(small), expected[0]);
  EXPECT_DOUBLE_EQ(weights.of(large.detach()), expected[1]);
  EXPECT_DOUBLE_EQ(weights.of(at::ones({5})), expected[2]);
}

TEST(LeafWeights, CountOthersByTheSameScale) {
  const at::Tensor small = at::ones({2}).requires_grad_(), large = at::ones({8}).requires_grad_();
  const LeafWeights weights({small, large}, {1, 100});
  // Alone it would count 1.
  EXPECT_EQ(weights.of({{1, 2}}), std::vector<double>{weights.of(small)});
  EXPECT_NE(weights.of(small), 1);
}

TEST(LeafWeights, FollowViewsAndCastsToALeaf) {
  const at::Tensor weight = at::ones({4, 2}).requires_grad_();
  const at::Tensor arranged = weight.t().to(at::kDouble).reshape({8});
  const auto leaf = leaf_behind(arranged.grad_fn().get());
  ASSERT_TRUE(leaf);
  EXPECT_TRUE(leaf->is_same(weight));
  EXPECT_FALSE(leaf_behind((2 * weight).grad_fn().get()));
}

TEST(ArrivingGradients, AddUpWhatArrivesAtEachLeaf) {
  const at::Tensor one = at::zeros({3}).requires_grad_(), other = at::zeros({4}).requires_grad_();
  const auto arriving = ArrivingGradients::at({one, at::ones({2}), other});
  EXPECT_TRUE(arriving->empty());
  (2 * one).sum().backward();
  (one + other.sum()).sum().backward();
  EXPECT_FALSE(arriving->empty());
  const LeafWeights expected({one, other}, {3 * 4 + 3, 4 * 9});
  EXPECT_NEAR(arriving->weights().of(one), expected.of(one), 1e-6);
  EXPECT_NEAR(arriving->weights().of(other), expected.of(other), 1e-6);
}

TEST(ArrivingGradients, LearnOfALeafInTheMidstOfABackward) {
  const at::Tensor one = at::zeros({3}).requires_grad_(), late = at::zeros({4}).requires_grad_();
  const auto arriving = ArrivingGradients::at({one});
  const at::Tensor sum = one.sum() + late.sum();
  sum.register_hook([&](const at::Tensor&) {
    arriving->also_at(late);
    arriving->also_at(late);  // is counted once
  });
  sum.backward();
  const LeafWeights expected({one, late}, {3, 4});
  EXPECT_NEAR(arriving->weights().of(late), expected.of(late), 1e-6);
}

TEST(ArrivingGradients, SayNothingWhereNoneArrived) {
  const at::Tensor leaf = at::zeros({3}).requires_grad_();
  EXPECT_EQ(ArrivingGradients::at({leaf})->weights().of(leaf), 1);
}

TEST(ArrivingGradients, LeaveNoHookBehind) {
  const at::Tensor leaf = at::zeros({3}).requires_grad_();
  const auto hooks = [&] { return torch::autograd::impl::hooks(leaf).size(); };
  auto first = ArrivingGradients::at({leaf});
  auto second = ArrivingGradients::at({leaf});
  EXPECT_EQ(hooks(), 2u);
  first.reset();
  EXPECT_EQ(hooks(), 1u);
  leaf.sum().backward();
  EXPECT_FALSE(second->empty());
  second.reset();
  EXPECT_EQ(hooks(), 0u);
}

}  // namespace
}  // namespace backfold::torch_layer
