// SPDX-License-Identifier: Apache-2.0
//
// Whose turn it is to be measured: the schedule of probes, and what of it is under way.
//
// A step whose turn it is goes as any other, but is watched: a probe goes along with it and, where
// the model's call can be run again, whoever runs it records the call. When the next step begins,
// what was recorded is measured, and the plan is made.

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
  std::vector<std::int64_t> steps;    // rising; the first step is 1
  std::optional<std::int64_t> every;  // steps after the last of them; none: never again

  // Whether `step` is listed, or a whole number of periods after the last listed one.
  bool includes(std::int64_t step) const;
};

// Raises ValueError for a step or period below 1, naming it.
ProbeSchedule make_schedule(std::vector<std::int64_t> steps, std::optional<std::int64_t> every);

struct ProbeTurns {
  ProbeSchedule schedule;
  double fraction = 0.25;                // of the batch that is run again
  std::function<void(double)> on_noise;  // every 100 steps

  // Part of a state.
  std::int64_t last = 0;  // step that was watched
  bool again = false;     // the last one came to nothing and is worth another try
  bool replays = true;    // whether the model's call is run again
  bool whole = false;     // and with all of its batch

  bool watches = false;                // the block that is open, or about to be
  bool waits = false;                  // for the backward of a step that was watched
  std::optional<std::int64_t> warned;  // of noise, at this step
};

// Whether sensitivities should be measured at this step.
bool probe_is_due(const State& state, std::int64_t step);

// Before a block: whether what waits should be measured now. `arrived` says whether its gradients
// have; where nobody recorded a call, the probe itself knows. False, too, where they may still
// come.
bool should_measure(const State& state, std::optional<bool> arrived);

// Every 100 steps: weighs the error that the plan expects against the gradient's own variance.
void look_if_due(State& state);

// Begins to watch the next block if its turn has come and nothing waits. `model_runs_again`: what
// runs inside the model is left out.
bool begin_turn(State& state, bool model_runs_again);
// The block is not entered after all.
void cancel_turn(State& state);
// The block has ended.
void end_block(State& state);
// What was watched is not measured: something better is at hand.
void forget_turn(State& state);
// Nothing waits afterwards, so that a state says all. True where the caller has to measure for
// that; what cannot be measured yet is watched again at the next step, in this run as in one that
// loads the state.
bool settle_turn(State& state, std::optional<bool> arrived);

// Ends a turn after its backward. `measured` sites are known from a second run already, `rest` is
// the signal gain of what the watching probe left out, `moved` by how much what the model returned
// moved in the last calibrate(). Plans where anything was measured; `energy` is that of the
// gradient, where the caller knows it better than the last calibrate().
void finish_turn(State& state, int measured, double rest, const std::vector<at::Tensor>& moved,
                 std::optional<double> energy);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_TURNS_H_
