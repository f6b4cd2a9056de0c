// SPDX-License-Identifier: Apache-2.0
//
// What a probe measured, still on the devices, and the tables of errors by width made from it.

#ifndef BACKFOLD_TORCH_PROBE_MEASUREMENTS_H_
#define BACKFOLD_TORCH_PROBE_MEASUREMENTS_H_

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <set>
#include <vector>

#include "torch/capture/site.h"
#include "torch/probe/gains.h"
#include "torch/probe/probed.h"
#include "torch/probe/rankings.h"

namespace backfold::torch_layer {

// The error that one site brings to the leaves at some widths.
struct Measurement {
  Site* site = nullptr;
  c10::SmallVector<int, 4> bits;
  Sensitivity::Estimate estimate = Sensitivity::Estimate::kNone;
  at::Tensor values;   // one norm per width
  bool summed = true;  // false: there is one width, and the norm of `values` is still to be taken
  double factor = 1;   // multiplies the norms
  const torch::autograd::Node* via = nullptr;   // if set, its signal gain multiplies the energies
  const torch::autograd::Node* into = nullptr;  // if set, its amplification does
  const Site* root = nullptr;  // whose packet the error comes from; null: the site's own root
};

// The relative error of a saved tensor whose node is not run again.
struct RelativeError {
  Site* site = nullptr;
  int bits = 0;
  std::shared_ptr<ProbedCall> call;
  at::Tensor norm, of_error;
};

class Measurements {
 public:
  void add(Measurement measurement) { measured_.push_back(std::move(measurement)); }
  void add(const std::vector<RelativeError>& errors) {
    relative_.insert(relative_.end(), errors.begin(), errors.end());
  }
  // Drops the relative errors of sites that have a better estimate.
  void drop_relative(const std::set<const Site*>& sites);

  // Writes a table to each site that was measured, with energies times `scale`, and forgets the
  // measurements. Returns the number of those sites.
  int write_tables(const Gains& gains, const Rankings& rankings, double scale);

 private:
  std::vector<double> read();

  std::vector<Measurement> measured_;
  std::vector<RelativeError> relative_;
};

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PROBE_MEASUREMENTS_H_
