// SPDX-License-Identifier: Apache-2.0
//
// What folding a tensor inside a compiled graph does to the gradient.
//
// A compiled backward is one node: to run it again for each of its tensors would take hours. But it
// is a graph of operators, and can be differentiated. With v a random direction of the parameters
// and u the derivative of <gradient, v> by a saved tensor, rounding the tensor by errors e that are
// independent and have mean 0 changes the gradient by an energy of
//
//   E |J e|^2 = E <J e, v>^2 = sum of u_i^2 * E e_i^2
//
// to first order. So a step is recorded, as it runs: the packets of each run of a graph, and what
// else its backward is given. When the next step begins, whoever knows the graph (in Python)
// differentiates it and hands u over for each tensor, one at a time. The errors e are those of
// packets of other widths, made from what the packet holds: a rounded value stands anywhere within
// one step of its group.

#ifndef BACKFOLD_TORCH_PROBE_GRAPHS_H_
#define BACKFOLD_TORCH_PROBE_GRAPHS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "torch/capture/graph_packet.h"

namespace backfold::torch_layer {

// One run of a graph, forward and backward.
struct GraphRun {
  std::int64_t graph = 0;  // its number
  int run = 0;             // in its step
  // What its backward is given beside packets, in the order of the graph's inputs.
  std::vector<at::Tensor> tensors = {};
  std::vector<std::int64_t> sizes = {};
  std::map<std::string, std::shared_ptr<GraphPacket>> packets = {};  // by name, as far as read
};

class GraphRuns {
 public:
  // `least` is the narrowest width to measure.
  explicit GraphRuns(std::uint64_t seed, int least) : seed_(seed), least_(least) {}

  // Backward, on any thread.
  void read(std::shared_ptr<GraphPacket> packet);
  // Of `tensors` the first `lasting` are not the graph's to write to; the others are copied. If
  // there is no memory for that, the run is not measured.
  void arrived(const GraphPacket& packet, at::TensorList tensors, at::IntArrayRef sizes,
               std::int64_t lasting);
  bool began() const;

  // Those whose backward ran, the last one first: gradients go on from it to nothing that follows.
  std::vector<GraphRun> take();

  // Takes the errors that the packet would bring at several widths. `derivative` is u.
  void measure(const GraphPacket& packet, const at::Tensor& derivative);
  // Writes what was measured to the sites. Returns their number.
  int write_tables();

 private:
  GraphRun& run_of(const GraphPacket& packet);

  struct Measured {
    Site* site = nullptr;
    Grouping grouping = {};
    std::vector<int> bits = {};
    at::Tensor energies = {};  // one for each
  };

  const std::uint64_t seed_;
  const int least_;
  mutable std::mutex mutex_;
  std::map<std::pair<std::int64_t, int>, std::size_t> index_;
  std::vector<GraphRun> runs_;
  std::vector<std::size_t> order_;  // of those that arrived
  std::vector<Measured> measured_;
  std::uint64_t draws_ = 0;
};

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PROBE_GRAPHS_H_
