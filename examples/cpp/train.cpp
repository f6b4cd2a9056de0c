// SPDX-License-Identifier: Apache-2.0
//
// A LibTorch program that trains a small convolutional network twice, plain and folded, and
// compares what the two hold between forward and backward, and their final losses.
//
//   train [steps] [bits]        bits 0 folds only what is exact

#include <torch/csrc/api/include/torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <optional>

#include "backfold/controller.h"

namespace {

struct Network : torch::nn::Module {
  torch::nn::Conv2d first{nullptr}, second{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
  torch::nn::Linear head{nullptr};

  Network() {
    first =
        register_module("first", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 16, 3).padding(1)));
    norm = register_module("norm", torch::nn::BatchNorm2d(16));
    second = register_module("second",
                             torch::nn::Conv2d(torch::nn::Conv2dOptions(16, 32, 3).padding(1)));
    head = register_module("head", torch::nn::Linear(32 * 8 * 8, 4));
  }

  // RECORD_USER_SCOPE names the parts of a model for the report, and for profilers.
  torch::Tensor forward(torch::Tensor x) {
    {
      RECORD_USER_SCOPE("stem");
      x = torch::relu(norm(first(x)));
    }
    {
      RECORD_USER_SCOPE("body");
      x = torch::max_pool2d(torch::relu(second(x)), 2);
    }
    RECORD_USER_SCOPE("head");
    return head(x.flatten(1));
  }
};

struct Batch {
  torch::Tensor images, labels;
};

// Images with a bright quadrant, which is the class.
Batch make_batch(std::int64_t size) {
  const torch::Tensor labels = torch::randint(0, 4, {size});
  torch::Tensor images = torch::randn({size, 1, 16, 16});
  for (std::int64_t i = 0; i < size; ++i) {
    const std::int64_t quadrant = labels[i].item<std::int64_t>();
    images[i].narrow(1, 8 * (quadrant / 2), 8).narrow(2, 8 * (quadrant % 2), 8).add_(1.0);
  }
  return {images, labels};
}

struct Outcome {
  double loss = 0;
  backfold::Report report;
};

Outcome train(int steps, std::optional<backfold::ControllerOptions> options) {
  torch::manual_seed(0);
  Network network;
  torch::optim::SGD optimizer(network.parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  std::optional<backfold::Controller> fold;
  if (options) fold.emplace(network, *options);

  Outcome outcome;
  for (int step = 0; step < steps; ++step) {
    const Batch batch = make_batch(64);
    optimizer.zero_grad();
    torch::Tensor loss;
    {
      std::optional<backfold::Controller::Scope> scope;
      if (fold) scope.emplace(fold->enter());
      loss = torch::nn::functional::cross_entropy(network.forward(batch.images), batch.labels);
    }
    loss.backward();
    optimizer.step();
    outcome.loss = loss.item<double>();
  }
  if (fold) outcome.report = fold->report();
  return outcome;
}

}  // namespace

int main(int argc, char** argv) {
  const int steps = argc > 1 ? std::atoi(argv[1]) : 60;
  const int bits = argc > 2 ? std::atoi(argv[2]) : 4;
  backfold::ControllerOptions options;
  options.bits = bits > 0 ? std::optional(bits) : std::nullopt;

  const Outcome plain = train(steps, std::nullopt);
  const Outcome folded = train(steps, options);
  std::printf("%s\n\n", folded.report.text().c_str());
  std::printf("loss after %d steps: plain %.6f, folded %.6f\n", steps, plain.loss, folded.loss);
  std::printf("kept for backward: %.2f MiB by autograd alone, %.2f MiB folded\n",
              static_cast<double>(folded.report.unique_bytes) / (1 << 20),
              static_cast<double>(folded.report.held_bytes) / (1 << 20));

  const bool same = bits > 0 ? std::abs(plain.loss - folded.loss) < 0.1 : plain.loss == folded.loss;
  const bool smaller = folded.report.held_bytes < folded.report.unique_bytes;
  return same && smaller ? 0 : 1;
}
