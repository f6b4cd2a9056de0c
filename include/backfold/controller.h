// SPDX-License-Identifier: Apache-2.0
//
// The controller: folds what backward needs while its scope lives.
//
//   backfold::Controller fold(*model, {.bits = 4});
//   for (auto& batch : loader) {
//     optimizer.zero_grad();
//     fold.step([&] {
//       return torch::cross_entropy_loss(model->forward(batch.data), batch.target);
//     });
//     optimizer.step();
//   }
//   std::cout << fold.report().text();
//
// A program that would rather run backward itself opens a scope around its forward:
//
//   {
//     auto scope = fold.enter();
//     loss = ...;
//   }
//   loss.backward();
//
// Parts of a model are told apart by torch's own RECORD_USER_SCOPE("encoder"), where a program uses
// it; without, by operator and order alone.

#ifndef BACKFOLD_CONTROLLER_H_
#define BACKFOLD_CONTROLLER_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
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

// How much is kept is said by one of `bits`, `ratio`, `budget` and `level`; the others stay as they
// are here.
struct ControllerOptions {
  // Mean width of a code over the elements of lossy tensors, from 1 to 16; none folds only what is
  // exact. Without a plan every tensor gets the next width below.
  std::optional<double> bits = 4;
  std::optional<double> ratio = {};         // what autograd alone would keep / what is held
  std::optional<std::int64_t> budget = {};  // bytes held at the end of a scope
  // Of GACT ("L0" to "L2.2", "paper-L0", "paper-L1"), of ActNN ("actnn-L0" to "actnn-L3"), or the
  // method of a paper ("pooled", "division", "mesa", "exact-project").
  std::string level = {};
  bool adaptive = true;                // false: one width everywhere, which `bits` names
  std::vector<std::string> keep = {};  // parts (shell patterns) whose tensors stay as they are
  std::vector<CodecRule> codec = {};   // for chosen places; the first that matches wins
  std::vector<Codec> menu = {};        // that plans may choose beside widths; unbiased ones
  std::int64_t min_bytes = 16'384;     // smaller tensors stay as they are
  std::uint64_t seed = 0;              // of stochastic rounding; torch's generators are not touched

  // Steps at which step() measures; then every `probe_every` steps, and where tensors appear that
  // the plan does not know.
  std::vector<std::int64_t> probe_steps = {2, 100, 300, 1000};
  std::optional<std::int64_t> probe_every = 1000;
  double probe_fraction = 0.25;  // of the batch, for a closure that can run a part of it
  // False for a forward whose effects must not happen twice: a coarser estimate stands in for what
  // a second run would measure.
  bool replay = true;
  // Called every 100 steps with the error that the plan expects / the gradient's own variance from
  // step to step. Above 0.1 a warning says what would help.
  std::function<void(double)> on_noise = {};
  // Where several processes train one model: called before each plan with what this one measured,
  // in JSON, one object per place in the order of their names. Returns what is planned by, which
  // should be the same in each of them.
  std::function<std::string(const std::string&)> combine = {};
};

// Bytes of "6GiB", "800 MB" or "1.5e9", for `budget`. Raises ValueError naming the text and the
// units that there are.
std::int64_t parse_bytes(std::string_view text);

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
    Scope(std::shared_ptr<torch_layer::State> state, std::unique_ptr<torch_layer::Entry> entry);
    std::shared_ptr<torch_layer::State> state_;  // null once moved from
    std::unique_ptr<torch_layer::Entry> entry_;
  };

  // Raises ValueError for an option that is not allowed, naming it.
  explicit Controller(ControllerOptions options = {});
  // Parameters and buffers of the model are never packed.
  explicit Controller(const torch::nn::Module& model, ControllerOptions options = {});
  ~Controller();

  // One step of training: runs `forward`, which returns the loss, in a scope, then backward from
  // the loss; the optimizer is the caller's. At steps of the schedule it then measures, by running
  // `forward` and backward again (see calibrate()), and plans. Returns the loss.
  at::Tensor step(const std::function<at::Tensor()>& forward);
  // The same for a forward that can run a part of its batch: it is given 1 in the step itself and
  // `probe_fraction` where it is run again.
  at::Tensor step(const std::function<at::Tensor(double)>& forward);

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

  // What was learned, measured and planned, as JSON: a controller of the same model that loads it
  // makes the packets that this one would have made. load() raises ValueError, having changed
  // nothing, for what is not the state of such a controller.
  void save(std::ostream& stream);
  void load(std::istream& stream);

  // Width and layout of every place that saves tensors, and why, as JSON to be read, edited and
  // given to another controller, which then measures nothing. load_plan() raises as load().
  void save_plan(std::ostream& stream) const;
  void load_plan(std::istream& stream);

  // For the layers above.
  torch_layer::State& state() { return *state_; }
  const std::shared_ptr<torch_layer::State>& shared_state() { return state_; }

 private:
  std::shared_ptr<torch_layer::State> state_;
};

}  // namespace backfold

#endif  // BACKFOLD_CONTROLLER_H_
