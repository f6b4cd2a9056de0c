// SPDX-License-Identifier: Apache-2.0
//
// How a target of the peak is kept, and a budget: steps are measured, and the plan is made anew
// where one took more than it was to.
//
// For a peak, a step is watched until two in a row have kept to the target, and again once a plan
// changes or the target is exceeded. On a GPU the allocator's peak begins anew with each step that
// is watched. Corrections only ever tighten: each but the first adds what was exceeded to a margin
// that no plan may use, and there is a bounded number of them.

#ifndef BACKFOLD_TORCH_PEAK_H_
#define BACKFOLD_TORCH_PEAK_H_

#include <cstdint>
#include <optional>

namespace backfold::torch_layer {

struct State;

struct PeakKeeping {
  bool watches = true;  // the next step
  int kept = 0;         // steps in a row that were watched and within the target
  int corrections = 0;
  std::int64_t looked_at = 0;  // the last step that was judged
  // Of the step that is under way, or was last.
  bool watched = false, planned = false;
  std::int64_t saved_bytes = 0;
  std::int64_t peak_before = 0;          // the allocator's, when it began
  std::optional<std::int64_t> measured;  // what it took at most, if it is known
};

// The block of a step is about to begin.
void begin_peak(State& state);
// The block of a step is over. Where a budget has something leave, waits for as many of the copies
// under way as would exceed it.
void wait_for_budget(State& state);
// Judges the last step, once. Its backward is over, and nothing else has run since.
void settle_peak(State& state);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PEAK_H_
