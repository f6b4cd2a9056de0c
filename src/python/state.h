// SPDX-License-Identifier: Apache-2.0
//
// What a controller knows of its sites, as Python objects that JSON can hold.

#ifndef BACKFOLD_PYTHON_STATE_H_
#define BACKFOLD_PYTHON_STATE_H_

#include <torch/csrc/utils/pybind.h>

#include "torch/capture/entry.h"

namespace backfold::python {

// What the last plan expects.
pybind11::dict summary_as_dict(const ReportPlan& plan);

pybind11::dict state_as_dict(torch_layer::State& state);
// Before each plan `combine`, which the caller keeps alive, gets what was measured, as the "sites"
// of state_as_dict(), and returns what is planned by.
void combine_tables_by(torch_layer::State& state, pybind11::handle combine);
// Raises, having changed nothing, for a state that is not one of this model.
void take_state(torch_layer::State& state, const pybind11::dict& dict);

// The plan alone: for each site its width, layout, and what is known of it.
pybind11::dict plan_as_dict(const torch_layer::State& state);
void take_plan(torch_layer::State& state, const pybind11::dict& dict);

}  // namespace backfold::python

#endif  // BACKFOLD_PYTHON_STATE_H_
