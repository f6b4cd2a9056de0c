// SPDX-License-Identifier: Apache-2.0
//
// Calibration: runs a probe over the user's step and leaves everything else as it was.

#ifndef BACKFOLD_TORCH_PROBE_CALIBRATE_H_
#define BACKFOLD_TORCH_PROBE_CALIBRATE_H_

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

#include "torch/capture/entry.h"

namespace backfold::torch_layer {

struct CalibrateOptions {
  // Leaves that receive a gradient and are no parameters of the model.
  std::vector<at::Tensor> leaves;
  // Energies are multiplied by this: what a part of the batch gives, made that of the whole.
  double scale = 1;
};

// `step` runs forward and backward; it is called twice, four times for the first plan at few bits,
// and once more, folded, where nothing is known of its sites yet. Parameters, gradients, buffers
// and torch's generators are bitwise what they were afterwards, also where `step` throws. Returns
// the number of sites that were measured.
int calibrate(const std::shared_ptr<State>& state, const std::function<void()>& step,
              const CalibrateOptions& options);

// The same by the procedure of GACT's paper, which the probe stands in for: every site folded
// alone, at each width of its table, against the gradient of a pass that folds nothing. Takes some
// passes for every site.
int calibrate_exactly(const std::shared_ptr<State>& state, const std::function<void()>& step,
                      const CalibrateOptions& options);

// Parameters, gradients, buffers and generators of a model as they are now.
class Snapshot {
 public:
  explicit Snapshot(const State& state);
  // For another pass: buffers and generators as they were, and no gradients, as from the beginning.
  void rewind() const;
  // Brings everything back.
  ~Snapshot();
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

 private:
  void forget_gradients() const;

  std::vector<at::Tensor> buffers_, copies_;
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients_;  // of which leaf
  std::vector<std::pair<at::Generator, at::Tensor>> generators_;
};

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PROBE_CALIBRATE_H_
