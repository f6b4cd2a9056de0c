// SPDX-License-Identifier: Apache-2.0
//
// How the processes that train together exchange what they have to say.

#ifndef BACKFOLD_TORCH_MEETING_H_
#define BACKFOLD_TORCH_MEETING_H_

#include <cstddef>
#include <string>
#include <vector>

#include "torch/json/fields.h"

namespace backfold::torch_layer {

struct State;

// What every process says under this heading, in the order of ranks. Waits for all of them. Raises
// RuntimeError if one is at another entry, or speaks of something else.
std::vector<Json> meet(State& state, const char* about, Json message);

// "rank 2: what"
std::string of_rank(std::size_t rank, const std::string& what);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_MEETING_H_
