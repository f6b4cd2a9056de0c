// SPDX-License-Identifier: Apache-2.0

#include "torch/probe/probed.h"

#include <ATen/Functions.h>

#include "torch/probe/closed_form.h"
#include "torch/probe/probe.h"
#include "torch/store/geometry.h"

namespace backfold::torch_layer {

at::Tensor Probed::read() {
  if (again_) return folded_.defined() ? folded_ : tensor_;
  const auto probe = probe_.lock();
  if (!probe) return tensor_;
  probe->read_begins(call_);
  // A tensor with a closed form enters the weight's gradient only, and no gradient that flows on.
  if (!probe->is_noisy() || call_->closed_form) return tensor_;
  const int bits = probe->width_now(site_);
  if (bits == kRawBits) return tensor_;
  return round_trip(tensor_, probe->format_of(site_, tensor_, bits), probe->next_key(), call_->by);
}

const at::Tensor& Probed::error_energies() {
  if (!errors_->energies.defined()) {
    const auto probe = probe_.lock();
    std::vector<at::Tensor> energies;
    for (const int bits : probe->widths(site_)) {
      const at::Tensor folded =
          round_trip(tensor_, probe->format_of(site_, tensor_, bits), probe->next_key());
      energies.push_back(
          energies_by_row(*call_->op, call_->arguments, difference(folded, tensor_)));
    }
    errors_->energies = at::stack(energies);
  }
  return errors_->energies;
}

at::Tensor NotKept::read() {
  if (const auto probe = probe_.lock()) probe->read_begins(nullptr);
  TORCH_CHECK(false, "backfold: this pass of a probe has no backward");
}

at::Tensor Watched::read() {
  if (const auto probe = probe_.lock()) probe->read_begins(nullptr);
  return tensor_;
}

at::Tensor FoldedLater::read() {
  const auto probe = probe_.lock();
  return probe ? probe->folded(tensor_, site_, call_->by) : tensor_;
}

}  // namespace backfold::torch_layer
