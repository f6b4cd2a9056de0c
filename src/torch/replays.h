// SPDX-License-Identifier: Apache-2.0
//
// Blocks that are captured into a CUDA graph.
//
// What such a block launches runs again at each replay; what it decides on the host does not. So
// its packets would be rounded with the same random numbers every time, and errors would add up
// from step to step. Instead its keys name a number on the device that the graph itself advances.
// Nothing is measured or planned while a graph is captured, and nothing in its replays.

#ifndef BACKFOLD_TORCH_REPLAYS_H_
#define BACKFOLD_TORCH_REPLAYS_H_

#include <cstdint>

namespace backfold::torch_layer {

struct State;

// Whether work on the device of the last block, or of the one about to begin, is captured now.
bool is_captured(const State& state);

// The number for the keys of the block that is about to begin, if it is captured; null for others.
// Raises where a controller cannot be captured, or not yet.
const std::uint32_t* next_turn(State& state);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_REPLAYS_H_
