// SPDX-License-Identifier: Apache-2.0
//
// Trains as tests/python/test_same_training.py does, from the weights and batches that it wrote,
// and writes what it compares: parameters, state, plan and report.
//
//   same_training folder steps middle

#include <torch/csrc/api/include/torch/nn/functional/activation.h>
#include <torch/csrc/api/include/torch/nn/functional/loss.h>
#include <torch/csrc/api/include/torch/nn/module.h>
#include <torch/csrc/api/include/torch/nn/modules/linear.h>
#include <torch/csrc/api/include/torch/nn/modules/normalization.h>
#include <torch/csrc/api/include/torch/utils.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>

#include "backfold/controller.h"

namespace {

constexpr std::int64_t kBatch = 32, kFeatures = 64, kHidden = 256, kClasses = 8;
constexpr std::int64_t kProbed = 2;
constexpr double kLearningRate = 0.05;

struct Network : torch::nn::Module {
  torch::nn::Linear up{nullptr}, down{nullptr}, head{nullptr};
  torch::nn::LayerNorm norm{nullptr};

  Network() {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kFeatures})));
    up = register_module("up", torch::nn::Linear(kFeatures, kHidden));
    down = register_module("down", torch::nn::Linear(kHidden, kFeatures));
    head = register_module("head", torch::nn::Linear(kFeatures, kClasses));
  }

  torch::Tensor forward(const torch::Tensor& x) {
    return head(x + down(torch::nn::functional::gelu(up(norm(x)))));
  }
};

void read(const std::string& path, torch::Tensor tensor) {
  const torch::NoGradGuard no_grad;
  torch::Tensor values = torch::empty_like(tensor);
  std::ifstream file(path, std::ios::binary);
  file.read(static_cast<char*>(values.mutable_data_ptr()),
            static_cast<std::streamsize>(values.nbytes()));
  if (!file) {
    std::fprintf(stderr, "same_training: %s is too short\n", path.c_str());
    std::exit(2);
  }
  tensor.copy_(values);
}

void write_parameters(const std::string& prefix, const Network& network) {
  for (const auto& parameter : network.named_parameters()) {
    std::ofstream file(prefix + parameter.key(), std::ios::binary);
    file.write(static_cast<const char*>(parameter.value().const_data_ptr()),
               static_cast<std::streamsize>(parameter.value().nbytes()));
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: same_training folder steps middle\n");
    return 2;
  }
  const std::string folder = std::string(argv[1]) + "/";
  const std::int64_t steps = std::atoll(argv[2]), middle = std::atoll(argv[3]);
  torch::set_num_threads(1);
  Network network;
  for (auto& parameter : network.named_parameters())
    read(folder + "begin." + parameter.key(), parameter.value());
  torch::Tensor inputs = torch::empty({steps, kBatch, kFeatures});
  torch::Tensor labels = torch::empty({steps, kBatch}, torch::kLong);
  read(folder + "inputs", inputs);
  read(folder + "labels", labels);

  backfold::Controller fold(
      network,
      {.bits = 3, .min_bytes = 0, .seed = 7, .probe_steps = {}, .probe_every = std::nullopt});
  for (std::int64_t step = 0; step < steps; ++step) {
    network.zero_grad();
    const auto loss = [&] {
      return torch::nn::functional::cross_entropy(network.forward(inputs[step]), labels[step]);
    };
    fold.step(loss);
    if (step + 1 == kProbed) fold.calibrate([&] { loss().backward(); });
    const torch::NoGradGuard no_grad;
    for (torch::Tensor& parameter : network.parameters())
      parameter.sub_(parameter.grad(), kLearningRate);
    if (step + 1 == middle) {
      write_parameters(folder + "middle.", network);
      std::ofstream state(folder + "middle.json");
      fold.save(state);
    }
  }
  write_parameters(folder + "end.", network);
  std::ofstream state(folder + "end.json"), plan(folder + "plan.json"),
      report(folder + "report.json");
  fold.save(state);
  fold.save_plan(plan);
  report << fold.report().json();
  return 0;
}
