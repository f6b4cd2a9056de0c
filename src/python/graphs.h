// SPDX-License-Identifier: Apache-2.0
//
// Compiled graphs, for Python, which knows what they are made of.

#ifndef BACKFOLD_PYTHON_GRAPHS_H_
#define BACKFOLD_PYTHON_GRAPHS_H_

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <vector>

#include "torch/state.h"

namespace backfold::python {

// A run of a graph that waits to be measured.
struct PyGraphRun {
  std::shared_ptr<torch_layer::GraphRuns> runs;
  torch_layer::GraphRun run;

  const std::shared_ptr<torch_layer::GraphPacket>& packet(const std::string& name) const;
};

// Those of the step that was watched, see torch/probe/graphs.h.
std::vector<std::shared_ptr<PyGraphRun>> graph_runs(torch_layer::State& state);

// Adds GraphRun and module_path to the module.
void add_graphs(pybind11::module_& module);

}  // namespace backfold::python

#endif  // BACKFOLD_PYTHON_GRAPHS_H_
