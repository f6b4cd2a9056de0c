// SPDX-License-Identifier: Apache-2.0
//
// Trains a layer for two steps and prints what was kept for backward.

#include <backfold/controller.h>
#include <torch/csrc/api/include/torch/nn/modules/linear.h>
#include <torch/csrc/api/include/torch/optim/sgd.h>
#include <torch/csrc/api/include/torch/utils.h>

#include <iostream>

int main() {
  torch::manual_seed(0);
  torch::nn::Linear layer(256, 256);
  torch::optim::SGD optimizer(layer->parameters(), 0.1);
  backfold::Controller fold(*layer, {.bits = 4});
  for (int step = 0; step < 2; ++step) {
    optimizer.zero_grad();
    torch::Tensor loss;
    {
      const auto scope = fold.enter();
      loss = layer(torch::randn({512, 256}).mul(2)).square().mean();
    }
    loss.backward();
    optimizer.step();
  }

  const backfold::Report report = fold.report();
  std::cout << report.text() << "\n";
  const bool folded = report.held_bytes * 4 < report.unique_bytes;
  return fold.steps() == 2 && folded ? 0 : 1;
}
