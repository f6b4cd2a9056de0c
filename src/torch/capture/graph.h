// SPDX-License-Identifier: Apache-2.0
//
// Graphs of torch.compile: what they save is packed and unpacked by operators inside the graphs
// (graph_ops.cpp), which are put there when a graph is compiled.
//
// What a graph is compiled with is a function of the controller's options alone, never of its
// steps. Widths are the plan's, and looked up when the graph runs (graph_packet.h).

#ifndef BACKFOLD_TORCH_CAPTURE_GRAPH_H_
#define BACKFOLD_TORCH_CAPTURE_GRAPH_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "torch/capture/graph_packet.h"
#include "torch/state.h"

namespace backfold::torch_layer {

// A tensor that a compiled graph saves.
struct GraphPlace {
  std::int64_t graph = 0;   // its number; 0: is not measured
  std::string_view module;  // that made it
  std::string_view name;    // in the graph
};

// What the backward graph needs of it.
struct GraphDemand {
  int floor = 0;            // the fewest bits
  bool zero_exact = false;  // zeros and signs
  bool exact = false;       // every bit: it is sent away as it is
};

struct GraphRules {
  bool rounds = false;  // or folds only what is exact
  bool measures = false;
  bool offloads = false;
  std::int64_t min_bytes = 0;
};

// None for a controller that leaves compiled graphs as they are: its codecs are chosen by operator
// or place, which these graphs no longer show.
std::optional<GraphRules> graph_rules(const State& state);

// Whether compiled graphs kept most of what the last step could round: it is measured as it runs
// (probe/graphs.h), since to run the model again would take another graph.
bool is_mostly_compiled(const State& state);

// Packs what a graph saves, in the block of this thread. Raises RuntimeError outside of a block.
std::shared_ptr<GraphPacket> fold_in_graph(const at::Tensor& dense, const GraphDemand& demand,
                                           const GraphPlace& place);

// Books what a graph keeps as it is, and why.
void keep_in_graph(const at::Tensor& tensor, const GraphPlace& place, std::string_view reason);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_CAPTURE_GRAPH_H_
