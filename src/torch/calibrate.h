// SPDX-License-Identifier: Apache-2.0
//
// Calibration: runs a probe over the user's step and restores everything that the step changed.

#ifndef BACKFOLD_TORCH_PROBE_CALIBRATE_H_
#define BACKFOLD_TORCH_PROBE_CALIBRATE_H_

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

#include "torch/capture/entry.h"
#include "torch/probe/leaf_weights.h"

namespace backfold::torch_layer {

struct CalibrateOptions {
  // Leaves that receive a gradient and are not parameters of the model.
  std::vector<at::Tensor> leaves;
  // Multiplies energies, to scale those of a part of the batch to the whole.
  double scale = 1;
  // `step` may write to memory that gradients share with others, as those of
  // DistributedDataParallel do with its buckets: they are copied then.
  bool accumulates = true;
  // The gradients of the user's own step, if they were watched. Otherwise `step` is called once
  // more.
  std::shared_ptr<const ArrivingGradients> arriving = nullptr;
};

// `step` runs forward and backward. It is called twice, or four times for the first plan at few
// bits, and once more each if its sites or the gradients of the user's step are not known.
// Afterwards parameters, gradients, buffers and torch's generators are bitwise what they were, even
// if `step` throws. Returns the number of sites measured.
int calibrate(const std::shared_ptr<State>& state, const std::function<void()>& step,
              const CalibrateOptions& options);

// The same by the procedure of GACT's paper, which the probe replaces: folds every site alone, at
// each width of its table, and compares with the gradient of a pass that folds nothing. Takes
// several passes for every site.
int calibrate_exactly(const std::shared_ptr<State>& state, const std::function<void()>& step,
                      const CalibrateOptions& options);

// Parameters, gradients, buffers and generators of a model as they are now.
class Snapshot {
 public:
  explicit Snapshot(const State& state, bool accumulates = true);
  // Prepares another pass: restores buffers and generators, and clears gradients.
  void rewind() const;
  // Restores everything.
  ~Snapshot();
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

 private:
  void forget_gradients() const;

  std::vector<at::Tensor> buffers_, copies_;
  struct Gradient {
    at::Tensor leaf, gradient;
    at::Tensor values;  // of one whose memory others have as well
  };
  std::vector<Gradient> gradients_;
  std::vector<std::pair<at::Generator, at::Tensor>> generators_;
};

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PROBE_CALIBRATE_H_
