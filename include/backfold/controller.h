// SPDX-License-Identifier: Apache-2.0
//
// The controller: folds what backward needs while its scope lives.
//
//   backfold::Controller fold(*model, {.bits = 4});
//   for (auto& batch : loader) {
//     torch::Tensor loss;
//     {
//       auto scope = fold.enter();
//       loss = torch::cross_entropy_loss(model->forward(batch.data), batch.target);
//     }
//     loss.backward();
//     ...
//   }
//   std::cout << fold.report().text();
//
// Parts of a model are told apart by torch's own RECORD_USER_SCOPE("encoder"), where a program uses
// it; without, by operator and order alone.

#ifndef BACKFOLD_CONTROLLER_H_
#define BACKFOLD_CONTROLLER_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backfold/codecs.h"
#include "backfold/report.h"

namespace torch::nn {
class Module;
}

namespace backfold {

namespace torch_layer {
class Entry;
struct State;
}  // namespace torch_layer

// What is to be kept: one of `bits`, `ratio` and `budget`; the others stay as they are here.
struct ControllerOptions {
  // Mean width of a code over the elements of lossy tensors, from 1 to 16; none folds only what is
  // exact. Without a plan every tensor gets the next width below.
  std::optional<double> bits = 4;
  std::optional<double> ratio = {};         // what autograd alone would keep, by what is held
  std::optional<std::int64_t> budget = {};  // bytes held at the end of a scope
  bool adaptive = true;                     // false: one width everywhere, which `bits` names
  std::vector<std::string> keep = {};       // parts (shell patterns) whose tensors stay as they are
  std::vector<CodecRule> codec = {};        // for chosen places; the first that matches wins
  std::vector<Codec> menu = {};             // that plans may choose beside widths; unbiased ones
  std::int64_t min_bytes = 16'384;          // smaller tensors stay as they are
  std::uint64_t seed = 0;  // of stochastic rounding; torch's generators are not touched
};

class Controller {
 public:
  // While one lives, what autograd saves on this thread is folded. Scopes end in the reverse of the
  // order in which they began, on the thread that began them.
  class Scope {
   public:
    Scope(Scope&&) noexcept;
    ~Scope();

   private:
    friend class Controller;
    explicit Scope(std::unique_ptr<torch_layer::Entry> entry);
    std::unique_ptr<torch_layer::Entry> entry_;
  };

  // Raises ValueError for an option that is not allowed, naming it.
  explicit Controller(ControllerOptions options = {});
  // Parameters and buffers of the model are never packed.
  explicit Controller(const torch::nn::Module& model, ControllerOptions options = {});
  ~Controller();

  // Measures how much folding each tensor would add to the gradient, and plans widths by it. `step`
  // runs forward and backward; it is called twice (four times for the first plan below 3 bits),
  // outside of any scope, and before the first scope once more. Parameters, gradients, buffers and
  // generators are what they were. Raises ValueError where no plan meets the budget, or where
  // `step` does not run backward.
  void calibrate(const std::function<void()>& step);

  // Says which samples of a data set, of `count` in all, the batch of the next scope holds: int64,
  // one for each. Places that are kept with codecs::Quantize{.per_sample = true} then rank samples
  // by range and by the gradient that each of them last had there, 4 bytes for every sample and
  // place. Raises TypeError or ValueError, naming the argument.
  void sample_ids(const at::Tensor& ids, std::int64_t count);

  // Raises RuntimeError if this controller is entered already, here or on another thread.
  [[nodiscard]] Scope enter();

  // Entries in which something was saved.
  std::int64_t steps() const;

  // Of the last such entry.
  Report report() const;

  // For the layers above.
  torch_layer::State& state() { return *state_; }
  const std::shared_ptr<torch_layer::State>& shared_state() { return state_; }

 private:
  std::shared_ptr<torch_layer::State> state_;
};

}  // namespace backfold

#endif  // BACKFOLD_CONTROLLER_H_
