// SPDX-License-Identifier: Apache-2.0
//
// Graphs of torch.compile: what they save is packed and unpacked by operators inside the graphs
// (graph_ops.cpp), which are put there when a graph is compiled.
//
// What a graph is compiled with is a function of the controller's options alone, never of its
// steps: a graph would have to be compiled again to change.

#ifndef BACKFOLD_TORCH_CAPTURE_GRAPH_H_
#define BACKFOLD_TORCH_CAPTURE_GRAPH_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "torch/state.h"

namespace backfold::torch_layer {

// A tensor that a compiled graph saves: the module that made it, and its name in the graph.
struct GraphPlace {
  std::string_view module;
  std::string_view name;
};

struct GraphRules {
  std::optional<int> bits;    // none: only what is exact
  bool spares_small = false;  // as in WidthRules
  std::int64_t min_bytes = 0;

  // The width of a tensor of `bytes` bytes of which backward needs at least `floor` bits.
  int width(std::int64_t bytes, int floor) const;
};

// None for a controller that leaves compiled graphs as they are: its codecs are chosen by operator
// or place, which these graphs no longer show.
std::optional<GraphRules> graph_rules(const State& state);

// Packs what a graph saves, in the block of this thread. The payload is a function of the sizes and
// the arguments, so that the graph can be compiled for it. Raises RuntimeError outside of a block.
at::Tensor fold_in_graph(const at::Tensor& dense, const Format& format, const GraphPlace& place);

// Books what a graph keeps as it is, and why.
void keep_in_graph(const at::Tensor& tensor, const GraphPlace& place, std::string_view reason);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_CAPTURE_GRAPH_H_
