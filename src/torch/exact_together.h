// SPDX-License-Identifier: Apache-2.0
//
// Several processes that keep to a target without rounding: when they make the plan that all of
// them have, which is made of what products take in each (plan/exact_agreement.h).
//
// They meet at every entry until all have timed a step, and then after 10 entries, at growing
// distances up to 100. There each says whether it knows something new: a larger step, or that one
// held more than the plan thought. One that has timed nothing is waited for in a bounded number of
// entries, and left out then.

#ifndef BACKFOLD_TORCH_EXACT_TOGETHER_H_
#define BACKFOLD_TORCH_EXACT_TOGETHER_H_

namespace backfold::torch_layer {

struct State;

// Before a block. Does nothing where this process plans alone, or rounds. Raises ValueError if the
// target cannot be kept, in all processes.
void plan_exactly_together(State& state);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_EXACT_TOGETHER_H_
