// SPDX-License-Identifier: Apache-2.0
//
// When to measure: the schedule of probes, and the turn that is under way.
//
// A step whose turn has come runs like any other, but is watched by a probe. If the model's call
// can be run again, the layer above records it. When the next step begins, the recorded call is
// measured and the plan is made.

#ifndef BACKFOLD_TORCH_TURNS_H_
#define BACKFOLD_TORCH_TURNS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace backfold::torch_layer {

struct State;

struct ProbeSchedule {
  std::vector<std::int64_t> steps;    // ascending; the first step is 1
  std::optional<std::int64_t> every;  // period after the last of them; none: never again

  // Whether `step` is listed, or a whole number of periods after the last listed one.
  bool includes(std::int64_t step) const;
};

// Raises ValueError for a step or period below 1, naming it.
ProbeSchedule make_schedule(std::vector<std::int64_t> steps, std::optional<std::int64_t> every);

struct ProbeTurns {
  ProbeSchedule schedule;
  double fraction = 0.25;                // of the batch that is run again
  std::function<void(double)> on_noise;  // called every 100 steps

  // Saved with the state.
  std::int64_t last = 0;  // the last step that was watched
  bool again = false;     // it led to nothing and is worth another try
  bool replays = true;    // whether the model's call is run again
  bool whole = false;     // with its whole batch

  bool watches = false;                // the block that is open, or about to be
  bool waits = false;                  // for the backward of a step that was watched
  std::optional<std::int64_t> warned;  // the step of the last warning about noise
};

// Whether sensitivities should be measured at this step.
bool probe_is_due(const State& state, std::int64_t step);

// Before a block: whether a waiting turn should be measured now. `arrived` says whether the
// gradients of the recorded call have arrived; none if no call was recorded, in which case the
// probe itself knows. False also if they may still come.
bool should_measure(const State& state, std::optional<bool> arrived);

// Every 100 steps: compares the error that the plan expects with the gradient's own variance.
void look_if_due(State& state);

// Begins to watch the next block if its turn has come and no other turn waits. With
// `model_runs_again`, the probe leaves out what runs inside the model.
bool begin_turn(State& state, bool model_runs_again);
// The block is not entered after all.
void cancel_turn(State& state);
// The block has ended.
void end_block(State& state);
// Drops the watched step without measuring it: a better measurement follows.
void forget_turn(State& state);
// Ensures that no turn waits, so that a state is complete. Returns whether the caller has to
// measure for that. A step that cannot be measured yet is watched again at the next step, both in
// this run and in one that loads the state.
bool settle_turn(State& state, std::optional<bool> arrived);

// Ends a turn after its backward, and plans if anything was measured. `measured` is the number of
// sites already known from a second run, `rest` the signal gain of what the watching probe left
// out, `moved` how far the model's outputs moved in the last calibrate(). `energy` is that of the
// gradient, if the caller knows it better than the last calibrate().
void finish_turn(State& state, int measured, double rest, const std::vector<at::Tensor>& moved,
                 std::optional<double> energy);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_TURNS_H_
