// SPDX-License-Identifier: Apache-2.0
//
// The controller: folds the tensors that autograd saves within its scope.
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
// A program that runs backward itself opens a scope around its forward:
//
//   {
//     auto scope = fold.enter();
//     loss = ...;
//   }
//   loss.backward();
//
// Parts of a model are identified by torch's own RECORD_USER_SCOPE("encoder") if the program uses
// it, and otherwise only by operator and order.

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

// Set one of `bits`, `ratio`, `budget`, `peak` and `level` to say how much is kept, and leave the
// others at their defaults. With `bits` set to none, `ratio`, `budget` and `peak` are met without
// rounding, by running products again.
struct ControllerOptions {
  // Mean width of a code over the elements of lossy tensors, from 1 to 16; none folds only what can
  // be folded exactly. Without a plan, every tensor gets the next width below.
  std::optional<double> bits = 4;
  std::optional<double> ratio = {};         // bytes that autograd alone would keep / bytes held
  std::optional<std::int64_t> budget = {};  // bytes held on the device at the end of a scope
  // Bytes at any moment of a step: all that torch allocates on a GPU, on a CPU what is held and
  // what is made for the node that runs.
  std::optional<std::int64_t> peak = {};
  // A level of GACT ("L0" to "L3", "paper-L0" to "paper-L2"; with checkpoints "paper-CB1" and
  // "paper-CB2") or ActNN ("actnn-L0" to "actnn-L5"), or the method of a paper ("pooled",
  // "division", "mesa", "exact-project").
  std::string level = {};
  bool adaptive = true;                // false: the same width everywhere, given by `bits`
  std::vector<std::string> keep = {};  // parts (shell patterns) whose tensors are not folded
  std::vector<CodecRule> codec = {};   // for chosen places; the first match wins
  std::vector<Codec> menu = {};        // unbiased codecs that plans may choose instead of a width
  std::int64_t min_bytes = 16'384;     // smaller tensors are not folded
  std::uint64_t seed = 0;              // of stochastic rounding; torch's generators are not touched
  // Tensors that a cheap operation makes of what is kept anyway are made again in backward, and
  // take no memory. A level derives nothing: it folds what its paper does.
  bool derive = true;
  // What is kept, folded or not, goes to pinned host memory, or from a CPU to a file in TMPDIR, and
  // comes back before backward reads it: all of it, which a budget counts all the same, or nothing.
  // None: only what a budget is not kept without.
  std::optional<bool> offload = {};
  // Segments of torch's allocator on GPUs grow and shrink (expandable_segments), so that packets in
  // memory that is nearly full leave no gaps too small for the next tensor. A setting of the whole
  // process, which stays. On a CPU it changes nothing.
  bool defragment = false;

  // Steps at which step() measures, then every `probe_every` steps, and whenever tensors appear
  // that the plan does not know.
  std::vector<std::int64_t> probe_steps = {2, 100, 300, 1000};
  std::optional<std::int64_t> probe_every = 1000;
  double probe_fraction = 0.25;  // of the batch, for a closure that can run part of it
  // False for a forward whose side effects must not happen twice: a coarser estimate is used
  // instead of a second run.
  bool replay = true;
  // Called every 100 steps with the error that the plan expects / the gradient's own variance from
  // step to step. Above 0.1, a warning says which target is enough.
  std::function<void(double)> on_noise = {};
  // For several processes that train one model, each with its own part of the data. Each rounds
  // differently, by its rank. With `gather` they also plan together: all of them measure at the
  // same entries of their scopes, and have the same plan from the same entry on. It sends bytes to
  // all processes, waits for theirs and returns what each sent, in the order of ranks; c10d's and
  // MPI's all-gather do that. It is called at a few entries only, always by all processes, which
  // must enter their scopes equally often with gradients enabled.
  int rank = 0;
  int world_size = 1;
  std::function<std::vector<std::string>(const std::string&)> gather = {};
};

// The number of bytes in "6GiB", "800 MB" or "1.5e9". Raises ValueError naming the argument that
// the text was given for, the text and the known units.
std::int64_t parse_bytes(std::string_view text, std::string_view argument = "budget");

class Controller {
 public:
  // During its lifetime, what autograd saves on this thread is folded. Scopes end in the reverse of
  // the order in which they began, on the thread that began them.
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

  // Raises ValueError naming the first option that is not allowed.
  explicit Controller(ControllerOptions options = {});
  // Parameters and buffers of the model are never packed.
  explicit Controller(const torch::nn::Module& model, ControllerOptions options = {});
  ~Controller();

  // One step of training: runs `forward`, which returns the loss, in a scope, then backward from
  // the loss; the caller runs the optimizer. At steps of the schedule it then measures, by running
  // `forward` and backward again (see calibrate()), and plans. Returns the loss.
  at::Tensor step(const std::function<at::Tensor()>& forward);
  // The same for a forward that can run part of its batch: it is passed 1 in the step itself, and
  // `probe_fraction` when it is run again.
  at::Tensor step(const std::function<at::Tensor(double)>& forward);

  // Measures how much error folding each tensor would add to the gradient, and plans widths
  // accordingly. `step` runs forward and backward; it is called twice (four times for the first
  // plan below 3 bits), outside of any scope, and once more if there was no scope yet. Parameters,
  // gradients, buffers and generators are restored. Raises ValueError if no plan meets the budget,
  // or if `step` does not run backward. Processes that plan together call it together.
  void calibrate(const std::function<void()>& step);

  // Says which samples of a data set of `count` samples the batch of the next scope holds: int64,
  // one id per sample. Places kept with codecs::Quantize{.per_sample = true} then rank samples by
  // range and by the gradient that each last had there, which takes 4 bytes per sample and place.
  // Raises TypeError or ValueError, naming the argument.
  void sample_ids(const at::Tensor& ids, std::int64_t count);

  // Raises RuntimeError if this controller is entered already, here or on another thread.
  [[nodiscard]] Scope enter();

  // The number of scopes in which something was saved.
  std::int64_t steps() const;

  // What the last such scope kept.
  Report report() const;

  // What was learned, measured and planned, as JSON. A controller of the same model that loads it
  // makes the packets that this one would have made. load() raises ValueError, and changes nothing,
  // if the stream does not hold the state of such a controller.
  void save(std::ostream& stream);
  void load(std::istream& stream);

  // Width and layout of every place that saves tensors, and why, as JSON to be read, edited and
  // loaded by another controller, which then measures nothing. load_plan() raises like load().
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
