// SPDX-License-Identifier: Apache-2.0
//
// A LibTorch program that trains a character model, stops in the middle, and goes on from what it
// saved: model, optimizer and controller. The resumed run ends on the bits of one that never
// stopped.
//
//   transformer [steps]

#include <torch/csrc/api/include/torch/nn/functional/loss.h>
#include <torch/csrc/api/include/torch/nn/modules/embedding.h>
#include <torch/csrc/api/include/torch/nn/modules/linear.h>
#include <torch/csrc/api/include/torch/nn/modules/normalization.h>
#include <torch/csrc/api/include/torch/optim/adamw.h>
#include <torch/csrc/api/include/torch/serialize.h>
#include <torch/csrc/api/include/torch/utils.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "backfold/controller.h"

namespace {

constexpr std::int64_t kWidth = 128, kHeads = 4, kLayers = 2, kContext = 64, kBatch = 16;

struct Block : torch::nn::Module {
  std::string name;  // RECORD_USER_SCOPE gives it to the report, and to profilers
  torch::nn::LayerNorm before_attention{nullptr}, before_mlp{nullptr};
  torch::nn::Linear qkv{nullptr}, projection{nullptr}, up{nullptr}, down{nullptr};

  explicit Block(std::string name) : name(std::move(name)) {
    const torch::nn::LayerNormOptions norm({kWidth});
    before_attention = register_module("before_attention", torch::nn::LayerNorm(norm));
    qkv = register_module("qkv", torch::nn::Linear(kWidth, 3 * kWidth));
    projection = register_module("projection", torch::nn::Linear(kWidth, kWidth));
    before_mlp = register_module("before_mlp", torch::nn::LayerNorm(norm));
    up = register_module("up", torch::nn::Linear(kWidth, 4 * kWidth));
    down = register_module("down", torch::nn::Linear(4 * kWidth, kWidth));
  }

  torch::Tensor forward(torch::Tensor x) {
    RECORD_USER_SCOPE(name);
    x = x + projection(attention(qkv(before_attention(x))));
    return x + down(torch::gelu(up(before_mlp(x))));
  }

  static torch::Tensor attention(const torch::Tensor& qkv) {
    const std::int64_t batch = qkv.size(0), length = qkv.size(1);
    const auto heads =
        qkv.view({batch, length, 3, kHeads, kWidth / kHeads}).permute({2, 0, 3, 1, 4}).unbind(0);
    const torch::Tensor mixed = at::scaled_dot_product_attention(
        heads[0], heads[1], heads[2], /*attn_mask=*/{}, /*dropout_p=*/0.0, /*is_causal=*/true);
    return mixed.transpose(1, 2).reshape({batch, length, kWidth});
  }
};

struct Transformer : torch::nn::Module {
  torch::nn::Embedding characters{nullptr}, positions{nullptr};
  std::vector<std::shared_ptr<Block>> blocks;
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear head{nullptr};

  explicit Transformer(std::int64_t alphabet) {
    characters = register_module("characters", torch::nn::Embedding(alphabet, kWidth));
    positions = register_module("positions", torch::nn::Embedding(kContext, kWidth));
    for (std::int64_t i = 0; i < kLayers; ++i) {
      const std::string name = "block" + std::to_string(i);
      blocks.push_back(register_module(name, std::make_shared<Block>(name)));
    }
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    head = register_module("head", torch::nn::Linear(kWidth, alphabet));
  }

  // Cross entropy of the character that follows each; both are [batch, length] of int64.
  torch::Tensor loss(const torch::Tensor& text, const torch::Tensor& next) {
    torch::Tensor x = characters(text) + positions(torch::arange(text.size(1)));
    for (const auto& block : blocks) x = block->forward(x);
    RECORD_USER_SCOPE("head");
    return torch::nn::functional::cross_entropy(head(norm(x)).flatten(0, 1), next.flatten());
  }
};

// Sentences of one shape: whoever knows the words can guess most letters.
class Text {
 public:
  Text() {
    std::mt19937 random(0);
    const auto one_of = [&](std::vector<std::string> words) {
      return words[random() % words.size()];
    };
    std::string sentences;
    while (sentences.size() < 20'000) {
      sentences += "the " + one_of({"quick", "patient", "small", "grey"}) + " ";
      sentences += one_of({"fox", "heron", "badger", "otter"}) + " ";
      sentences += one_of({"follows", "finds", "greets", "avoids"}) + " the ";
      sentences += one_of({"river", "mole", "miller", "moon"}) + ".\n";
    }
    for (const char letter : sentences)
      if (alphabet_.find(letter) == std::string::npos) alphabet_ += letter;
    std::vector<std::int64_t> codes;
    for (const char letter : sentences)
      codes.push_back(static_cast<std::int64_t>(alphabet_.find(letter)));
    codes_ = torch::tensor(codes);
  }

  std::int64_t alphabet() const { return static_cast<std::int64_t>(alphabet_.size()); }

  // kContext + 1 letters from kBatch places, which the number of the step decides.
  torch::Tensor batch(int step) const {
    std::mt19937 random(static_cast<unsigned>(step));
    std::vector<torch::Tensor> rows;
    for (std::int64_t i = 0; i < kBatch; ++i) {
      const auto places = static_cast<unsigned>(codes_.size(0) - kContext);
      rows.push_back(codes_.narrow(0, random() % places, kContext + 1));
    }
    return torch::stack(rows);
  }

 private:
  std::string alphabet_;
  torch::Tensor codes_;
};

struct Checkpoint {
  std::stringstream model, optimizer, fold;
};

// What one process has in memory; only a checkpoint outlives it.
class Training {
 public:
  // It measures once before the checkpoint and once after it: the schedule is resumed, too.
  Training(const Text& text, int steps)
      : text_(text),
        model_(std::make_shared<Transformer>(text.alphabet())),
        optimizer_(model_->parameters(), torch::optim::AdamWOptions(3e-3)),
        fold_(*model_, {.level = "L2", .probe_steps = {2, steps / 2 + 2}}) {}

  // Returns the last loss.
  double run(int first, int last) {
    torch::Tensor loss;
    for (int step = first; step < last; ++step) {
      const torch::Tensor letters = text_.batch(step);
      optimizer_.zero_grad();
      // Forward and backward; what backward needs is folded away in between.
      loss = fold_.step([&] {
        return model_->loss(letters.narrow(1, 0, kContext), letters.narrow(1, 1, kContext));
      });
      optimizer_.step();
    }
    return loss.item<double>();
  }

  void save(Checkpoint& checkpoint) {
    torch::save(model_, checkpoint.model);
    torch::save(optimizer_, checkpoint.optimizer);
    fold_.save(checkpoint.fold);
  }

  void load(Checkpoint& checkpoint) {
    torch::load(model_, checkpoint.model);
    torch::load(optimizer_, checkpoint.optimizer);
    fold_.load(checkpoint.fold);
  }

  std::vector<torch::Tensor> parameters() const { return model_->parameters(); }
  backfold::Report report() const { return fold_.report(); }

 private:
  const Text& text_;
  std::shared_ptr<Transformer> model_;
  torch::optim::AdamW optimizer_;
  backfold::Controller fold_;
};

bool same_bits(const Training& a, const Training& b) {
  const auto left = a.parameters(), right = b.parameters();
  return std::equal(left.begin(), left.end(), right.begin(), right.end(),
                    [](const torch::Tensor& x, const torch::Tensor& y) { return x.equal(y); });
}

}  // namespace

int main(int argc, char** argv) {
  const int steps = std::max(argc > 1 ? std::atoi(argv[1]) : 40, 8);
  const Text text;

  torch::manual_seed(0);
  Training whole(text, steps);
  const double first_loss = whole.run(0, 1);
  whole.run(1, steps / 2);
  Checkpoint checkpoint;
  whole.save(checkpoint);
  const double last_loss = whole.run(steps / 2, steps);

  torch::manual_seed(1);  // other weights, until they are loaded
  Training resumed(text, steps);
  resumed.load(checkpoint);
  resumed.run(steps / 2, steps);

  const backfold::Report report = whole.report();
  const bool same = same_bits(whole, resumed);
  std::printf("%s\n\n", report.text().c_str());
  std::printf("loss: %.4f at first, %.4f after %d steps\n", first_loss, last_loss, steps);
  std::printf("kept for backward: %.2f MiB by autograd alone, %.2f MiB folded\n",
              static_cast<double>(report.unique_bytes) / (1 << 20),
              static_cast<double>(report.held_bytes) / (1 << 20));
  std::printf("resumed after %d steps: %s\n", steps / 2, same ? "the same bits" : "not the same");
  return same && last_loss < first_loss / 2 && report.held_bytes * 3 < report.unique_bytes ? 0 : 1;
}
