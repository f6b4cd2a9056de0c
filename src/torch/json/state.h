// SPDX-License-Identifier: Apache-2.0
//
// State and plan as JSON, in one format for every language, which users can read, edit and load.

#ifndef BACKFOLD_TORCH_JSON_STATE_H_
#define BACKFOLD_TORCH_JSON_STATE_H_

#include <string>
#include <string_view>

#include "torch/json/fields.h"
#include "torch/plan/combine.h"
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

// What this process knows, and the same for the others that train the model with it. What codecs
// remember is left out, but for the scores that plans read.
Tables tables_of(const State& state);
Json tables_as_json(const Tables& tables, const Policy& policy);
Tables tables_from_json(const Json& json, const Policy& policy);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_JSON_STATE_H_
