// SPDX-License-Identifier: Apache-2.0
//
// Several processes that train one model, each with its own part of the data: what they say to each
// other, and when.
//
// All of them enter their blocks equally often with gradients enabled, and count these entries.
// They meet only where the count, or an earlier meeting, tells all of them to, so that no process
// waits for one that does not come:
//
//   first entry          each says what its model and its options are; others than those of the
//                        first process are an error
//   second entry         if a target may need products to run again: which ones each would, which
//                        all of them do until there is a plan
//   after a probe step   each says whether its call of the model can be run again. Either all of
//                        them run it again, as it may contain collectives, or none does
//   after measuring      each says what it measured; all make the same plan of it
//   now and then         each says whether it has met tensors that the plan does not know: after 10
//                        entries, then at growing distances up to 100
//
// Without rounding nothing is measured but times (exact_together.h).
//
// Between meetings nothing is exchanged and nothing waits. A process that fails at its part says so
// at the meeting instead of staying away.

#ifndef BACKFOLD_TORCH_TOGETHER_H_
#define BACKFOLD_TORCH_TOGETHER_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace backfold::torch_layer {

// Steps after which a backward that a turn waits for is given up, by one process or by several
// together. Gradients may be accumulated over several blocks before the first of them runs
// backward.
inline constexpr std::int64_t kPatience = 64;

struct State;

// Sends bytes to all processes, and returns what each of them sent, in the order of ranks.
using Gather = std::function<std::vector<std::string>(const std::string&)>;

constexpr std::int64_t kFirstLook = 10;

struct Together {
  int rank = 0, size = 1;
  Gather gather;  // none: each process plans on its own
  bool introduced = false;
  bool pending = false;    // a turn that all processes have begun
  bool dropped = false;    // this one has dropped it, for the sake of a state that was saved
  bool away = false;       // from meetings, as processes may run out of batches at different times
  std::int64_t begun = 0;  // the entry at which it began
  std::int64_t last = 0;   // the number of this process's steps at the last meeting
  int fruitless = 0;       // turns in a row in which a process saved nothing, or has timed nothing

  // Saved with the state.
  std::int64_t entries = 0;
  std::int64_t next_look = 0;
  std::int64_t between_looks = kFirstLook;

  bool on() const { return gather && size > 1; }
};

// What a process has recorded of the step that it watched.
struct Recorded {
  enum class What {
    kNothing,   // no call of the model: the probe alone knows the step
    kWaiting,   // a call whose gradients have not arrived
    kComplete,  // a call that can be run again
    kBroken,    // one that cannot
  } what = What::kNothing;
  std::string obstacle;  // of a broken one
};

// What to do about a turn that waits.
struct Resolution {
  bool measure = false;
  bool replay = false;   // by running the recorded call again
  std::string obstacle;  // why it is never to be run again; empty if it may be
};

// A measurement by running the model again that failed.
struct Failure {
  std::string why;      // empty: it did not
  bool part = false;    // it ran a part of the batch: the whole may still work
  bool memory = false;  // there was too little: a smaller part may still work
};

// How a turn ended.
struct Outcome {
  std::string obstacle;  // why the model is never to be run again; empty if it may be
  bool whole = false;    // it must be run with its whole batch from now on
};

// This process is one of `size` that train together. Raises ValueError for a rank that is none.
void join(State& state, int rank, int size, Gather gather);

// Counts an entry, and introduces the processes to each other at the first. Raises ValueError that
// names what differs between their models or options.
void count_entry(State& state);

// Says when they look again for what is new: soon after a plan, then less and less often.
void plan_next_look(Together& together, bool after_plan);

// What all processes do about the turn that waits.
Resolution resolve_together(State& state, const Recorded& recorded);

// Whether all processes watch the next block. May make a plan, of what was measured before.
bool is_due_together(State& state);

// All processes say what they measured, and plan. Returns how the turn ended for all of them.
Outcome plan_together(State& state, const Failure& failure = {});

// Runs `measure`, then plans together. A process whose `measure` raises tells the others first;
// nobody stays without an error.
void measure_together(State& state, const std::function<int()>& measure);

// Plans from what `measure` measures now, with the others if there are any.
void measure_and_plan(State& state, const std::function<int()>& measure);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_TOGETHER_H_
