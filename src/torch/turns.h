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

#include "torch/together.h"

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

// Which part of a batch is run again.
struct ProbePart {
  double wanted = 0.25;   // few enough rows that a probe needs no more memory than a step
  double at_most = 0.25;  // for the sake of the few rows that a measurement should have
};

struct ProbeTurns {
  ProbeSchedule schedule;
  double fraction = 0.25;                // of the batch that is run again, at most
  std::function<void(double)> on_noise;  // called every 100 steps

  // Saved with the state.
  std::int64_t last = 0;  // the last step that was watched
  bool again = false;     // it led to nothing and is worth another try
  bool replays = true;    // whether the model's call is run again
  bool whole = false;     // with its whole batch
  bool marked = false;    // the plan's set of products changed, which led to another probe
  int halved = 0;         // how often memory did not suffice for the part of the batch

  bool watches = false;                // the block that is open, or about to be
  bool waits = false;                  // for the backward of a step that was watched
  std::optional<std::int64_t> warned;  // the step of the last warning about noise
};

// The part of the batch that is run again now, at most.
double fraction_now(const ProbeTurns& turns);
// Memory did not suffice for it: half of it is tried at the next turn, if that is worth it.
bool try_half(ProbeTurns& turns);

// Whether sensitivities should be measured at this step.
bool probe_is_due(const State& state, std::int64_t step);

// Whether the backward of the step that was watched has begun.
bool has_arrived(const State& state, const Recorded& recorded);

// Before a block: what to do about a turn that waits. Nothing if its backward may still come.
Resolution resolve_turn(State& state, const Recorded& recorded);

// Every 100 steps: compares the error that the plan expects with the gradient's own variance.
void look_if_due(State& state);

// Whether the turn of the next block has come and no other turn waits.
bool is_due(State& state);
// Begins to watch the next block, whose turn has come. With `model_runs_again`, the probe leaves
// out what runs inside the model.
void begin_turn(State& state, bool model_runs_again);
// What to run again of the next block, by what the last one kept.
ProbePart part_to_run_again(const State& state);
// The block is not entered after all.
void cancel_turn(State& state);
// The block has ended.
void end_block(State& state);
// Drops the watched step without measuring it: a better measurement follows.
void forget_turn(State& state);
// Ensures that no turn waits, so that a state is complete. Returns whether the caller has to
// measure for that. A step that cannot be measured yet is watched again at the next step, both in
// this run and in one that loads the state.
// Of several processes that plan together one may save a state alone: the turn is dropped then, and
// the others drop it when they meet.
bool settle_turn(State& state, const Recorded& recorded);

// Of the gradient, scaled to the whole batch as noise is: 1 / share times that of a part.
struct PartEnergy {
  double of_part = 0;
  double share = 1;             // that was run again
  std::optional<double> whole;  // that of the user's own step, if it was seen
};

// What running the model again has found.
struct Replayed {
  int measured = 0;                  // sites
  double rest = 0;                   // the signal gain of what the watching probe left out
  std::vector<at::Tensor> moved;     // how far the model's outputs moved in the last calibrate()
  std::optional<PartEnergy> energy;  // if known better than to the last calibrate()
  Failure failure;
};

// Ends a turn after its backward, and plans if anything was measured.
Outcome finish_turn(State& state, const Replayed& replayed);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_TURNS_H_
