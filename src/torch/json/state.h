// SPDX-License-Identifier: Apache-2.0
//
// State and plan as JSON, in one format for every language, which users can read, edit and load.

#ifndef BACKFOLD_TORCH_JSON_STATE_H_
#define BACKFOLD_TORCH_JSON_STATE_H_

#include <string>
#include <string_view>
#include <vector>

#include "torch/state.h"

namespace backfold::torch_layer {

// What was learned, measured and planned.
std::string state_as_json(State& state);
// Raises ValueError, and changes nothing, for a state that does not belong to this model.
void take_state(State& state, std::string_view json);

// The plan alone: the width and layout of each site, and what is known about it.
std::string plan_as_json(const State& state);
// Uses the widths of the plan, and measures nothing from now on. Raises like take_state().
void take_plan(State& state, std::string_view json);

// The measurements, as the "sites" of a state, for callers that combine them.
std::string records_text(const std::vector<SiteRecord>& records, const Policy& policy);
std::vector<SiteRecord> records_of_text(std::string_view json, const Policy& policy);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_JSON_STATE_H_
