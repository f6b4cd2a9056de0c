// SPDX-License-Identifier: Apache-2.0
//
// What folding the tensors that checkpoints start again from does to the gradient.
//
// Their reader is not one node but a whole segment, which backward runs again. So each width takes
// a pass of its own, with all starts folded at once. To tell them apart, a gradient that arrives at
// a start is compared with that of the clean pass, then replaced by it: all segments receive clean
// gradients, and what changes in one is the doing of its own starts.
//
//   leaves      a gradient that arrives at a leaf belongs to the segment that was started last; its
//               error is taken in full, at up to 65,536 coordinates
//   upstream    the error of the gradient at the start, times the tangent there (tangents.h),
//               by rows; or in all at once, if that is far more than independent rows explain, as
//               for a bias
//
// Starts of one segment share the errors of its leaves by their elements.

#ifndef BACKFOLD_TORCH_PROBE_STARTS_H_
#define BACKFOLD_TORCH_PROBE_STARTS_H_

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "torch/capture/site.h"
#include "torch/probe/measurements.h"

namespace backfold::torch_layer {

class Starts : public std::enable_shared_from_this<Starts> {
 public:
  enum class Pass : std::uint8_t { kMoved, kClean, kFolded };

  Starts(double epsilon, LeafWeights weights) : epsilon_(epsilon), weights_(std::move(weights)) {}
  ~Starts();
  Starts(const Starts&) = delete;
  Starts& operator=(const Starts&) = delete;

  // `bits`, of a pass of kind kFolded.
  void begin(Pass pass, int bits);
  // From now on gradients of these leaves are compared.
  void watch(const std::vector<at::Tensor>& leaves);

  // The next start of the pass. Returns its number; none if earlier passes had another one there.
  std::optional<std::size_t> add(const at::Tensor& tensor, Site& site);
  // A segment runs again from it, and from others that are read before any gradient arrives.
  void read(std::size_t start);

  // The widths at which a packet is measured from which a checkpoint starts, rising.
  static c10::SmallVector<int, 4> widths_of(const Footprint& packet);
  // The widths to measure, the narrowest first; none if there is nothing to be folded, or if the
  // passes so far had different starts.
  c10::SmallVector<int, 4> widths() const;
  // What was measured, for the sites' tables, which are empty until it is entered there. Nothing,
  // if passes had different starts.
  std::vector<Measurement> take();
  // Gives up: the sites' tables are empty afterwards.
  void forget();

 private:
  struct Start {
    Site* site = nullptr;
    at::Tensor moved;  // in the first pass, until the next
    std::uint32_t version = 0;
    at::Tensor tangent = {}, gradient = {};
    std::vector<std::int64_t> sizes;
    double elements = 0;
  };
  struct Leaf {
    at::Tensor tensor;
    std::int64_t stride = 1;             // from one coordinate that is compared to the next
    std::vector<at::Tensor> clean = {};  // by arrival
    std::size_t arrivals = 0;
  };

  class LeafHook;
  class StartHook;

  void leaf_arrived(std::size_t leaf, const at::Tensor& gradient);
  // What goes on in place of the gradient; undefined for the gradient itself.
  at::Tensor arrived(std::size_t start, const at::Tensor& gradient);
  void measure(std::size_t start, const at::Tensor& norm, double factor);

  const double epsilon_;
  const LeafWeights weights_;
  Pass pass_ = Pass::kMoved;
  int bits_ = 0;
  std::vector<Start> starts_;  // in the order of their saves
  std::size_t next_ = 0;
  std::mutex mutex_;  // guards what follows: gradients arrive on autograd's threads
  std::vector<Leaf> leaves_;
  std::vector<std::size_t> segment_;  // the starts of the one that runs
  bool reading_ = false;
  bool differs_ = false;  // from pass to pass
  std::vector<Measurement> measured_;
};

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PROBE_STARTS_H_
