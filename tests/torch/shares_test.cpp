// SPDX-License-Identifier: Apache-2.0

#include "torch/codec/shares.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>

#include <limits>

namespace backfold::torch_layer {
namespace {

// How far the shares of logarithms are from adding up to 1.
double off(const at::Tensor& logarithms, std::int64_t dim) {
  return (logarithms.exp().sum(dim) - 1).abs().max().item<double>();
}

TEST(Shares, AddUpAlongAnyDimension) {
  const at::Tensor x = at::randn({5, 7, 3});
  for (const std::int64_t dim : {0, 1, 2, -1, -3}) {
    at::Tensor logarithms = x.log_softmax(dim) + 0.1 * at::randn_like(x);
    EXPECT_GT(off(logarithms, dim), 1e-3);
    const at::Tensor differences = logarithms - logarithms.select(dim, 0).unsqueeze(dim);
    restore_sums(logarithms, dim);
    EXPECT_LT(off(logarithms, dim), 1e-6) << dim;
    // All of a row move together.
    EXPECT_TRUE(at::allclose(logarithms - logarithms.select(dim, 0).unsqueeze(dim), differences,
                             1e-5, 1e-5));
  }
}

TEST(Shares, AddUpInAnyOrderOfMemory) {
  at::Tensor logarithms = at::randn({2, 5, 4, 3}).contiguous(at::MemoryFormat::ChannelsLast);
  restore_sums(logarithms, 1);
  EXPECT_LT(off(logarithms, 1), 1e-6);
  EXPECT_TRUE(logarithms.is_contiguous(at::MemoryFormat::ChannelsLast));
}

TEST(Shares, AddUpWhereAllRowsDoNotFitAtOnce) {
  at::Tensor logarithms = at::rand({5, 1 << 23});
  restore_sums(logarithms, 1);
  EXPECT_LT(off(logarithms, 1), 1e-3);
}

TEST(Shares, OfNothingAndOfOne) {
  at::Tensor none = at::empty({0, 4}), single = at::zeros({}), row = at::full({4}, -3.0);
  restore_sums(none, 1);
  restore_sums(single, 0);
  restore_sums(row, 0);
  EXPECT_LT(off(row, 0), 1e-6);
}

TEST(Shares, AreLeftAloneInRowsThatAreNoNumbers) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  at::Tensor rows = at::tensor({-1.0, nan, -2.0, -1.0, -1.0, -1.0}).view({2, 3});
  restore_sums(rows, 1);
  EXPECT_EQ(rows[0][0].item<double>(), -1);
  EXPECT_LT(off(rows[1], 0), 1e-6);
}

TEST(Shares, OfNothingButOneStayImpossible) {
  const double never = -std::numeric_limits<double>::infinity();
  at::Tensor row = at::tensor({-1.0, never, -2.0});
  restore_sums(row, 0);
  EXPECT_EQ(row[1].item<double>(), never);
  EXPECT_LT(off(row, 0), 1e-6);
}

}  // namespace
}  // namespace backfold::torch_layer
