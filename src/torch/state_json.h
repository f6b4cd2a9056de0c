// SPDX-License-Identifier: Apache-2.0
//
// State and plan as JSON, one format for every language: what is written here is what users read,
// edit and load.

#ifndef BACKFOLD_TORCH_STATE_JSON_H_
#define BACKFOLD_TORCH_STATE_JSON_H_

#include <string>
#include <string_view>
#include <vector>

#include "torch/state.h"

namespace backfold::torch_layer {

// What was learned, measured and planned.
std::string state_as_json(State& state);
// Raises ValueError, having changed nothing, for a state that is not one of this model.
void take_state(State& state, std::string_view json);

// The plan alone: for each site its width, layout, and what is known of it.
std::string plan_as_json(const State& state);
// From now on nothing is measured, and widths are those of the plan. Raises as take_state().
void take_plan(State& state, std::string_view json);

// What was measured, as the "sites" of a state, for those who combine it.
std::string records_text(const std::vector<SiteRecord>& records, const Policy& policy);
std::vector<SiteRecord> records_of_text(std::string_view json, const Policy& policy);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_STATE_JSON_H_
