// SPDX-License-Identifier: Apache-2.0

#include "torch/step.h"

#include "torch/calibrate.h"
#include "torch/state.h"

namespace backfold::torch_layer {

at::Tensor run_step(Controller& controller, const std::function<at::Tensor(double)>& forward,
                    double part) {
  const std::shared_ptr<State>& state = controller.shared_state();
  ProbeTurns& turns = state->turns;
  if (resolve_turn(*state, {}).measure) finish_turn(*state, {});
  look_if_due(*state);
  const bool due = is_due(*state);
  // All of the step is in `forward`: running it again needs no probe beside the user's own step.
  const bool runs_again = due && turns.replays;
  if (due && !runs_again) begin_turn(*state, false);
  const auto arriving = runs_again ? ArrivingGradients::at(tensors_of(state->model)) : nullptr;
  const std::int64_t before = state->blocks.steps;
  at::Tensor loss;
  try {
    const auto scope = controller.enter();
    loss = forward(1);
  } catch (...) {
    cancel_turn(*state);
    throw;
  }
  TORCH_CHECK_VALUE(loss.defined() && loss.requires_grad(),
                    "forward must return a loss that requires gradients");
  loss.backward();
  if (!runs_again) return loss;
  const bool saved = state->blocks.steps != before;
  if (state->together.on()) {
    state->together.pending = true;
    turns.waits = saved;
    if (!resolve_together(*state, {Recorded::What::kComplete, {}}).replay) {
      turns.waits = false;
      return loss;
    }
  } else if (!saved) {
    return loss;
  }
  turns.last = state->blocks.steps;
  turns.again = false;
  settle_peak(*state);  // before anything is run again
  const auto measure = [&] {
    return calibrate(state, [&] { forward(part).backward(); },
                     {.leaves = {}, .scale = part, .arriving = arriving});
  };
  if (state->together.on()) {
    measure_together(*state, measure);
  } else if (measure() > 0) {
    replan(*state);
  }
  return loss;
}

}  // namespace backfold::torch_layer
