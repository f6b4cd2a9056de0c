// SPDX-License-Identifier: Apache-2.0

#include "torch/step.h"

#include "torch/calibrate.h"
#include "torch/state.h"

namespace backfold::torch_layer {

at::Tensor run_step(Controller& controller, const std::function<at::Tensor(double)>& forward,
                    double part) {
  const std::shared_ptr<State>& state = controller.shared_state();
  ProbeTurns& turns = state->turns;
  if (should_measure(*state, std::nullopt)) finish_turn(*state, 0, 0, {}, std::nullopt);
  look_if_due(*state);
  // All of the step is in `forward`: running it again needs no probe beside the user's own step.
  const bool runs_again = turns.replays && probe_is_due(*state, state->blocks.steps + 1);
  if (!runs_again) begin_turn(*state, false);
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
  if (!runs_again || state->blocks.steps == before) return loss;
  turns.last = state->blocks.steps;
  turns.again = false;
  const int measured =
      calibrate(state, [&] { forward(part).backward(); }, {.leaves = {}, .scale = part});
  finish_turn(*state, measured, 0, {}, std::nullopt);
  return loss;
}

}  // namespace backfold::torch_layer
