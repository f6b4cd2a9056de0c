// SPDX-License-Identifier: Apache-2.0

#include "torch/probe/probed.h"

#include <ATen/Functions.h>

#include <algorithm>

#include "torch/probe/closed_form.h"
#include "torch/probe/probe.h"
#include "torch/store/geometry.h"

namespace backfold::torch_layer {

at::Tensor Probed::read() {
  if (again_) return folded_.defined() ? folded_ : comeback_.tensor;
  const auto probe = probe_.lock();
  if (!probe) return comeback_.tensor;
  probe->read_begins(call_);
  // A tensor with a closed form enters the weight's gradient only, and no gradient that flows on.
  if (!probe->is_noisy() || call_->closed_form) return comeback_.tensor;
  return comeback_.with([&](const Leaf& leaf) {
    const int bits = probe->width_now(leaf.site);
    return bits == kRawBits ? at::Tensor() : probe->folded(leaf, bits, probe->next_key());
  });
}

const at::Tensor& Probed::error_energies(const Site* root) {
  const auto which = std::find(roots_.begin(), roots_.end(), root) - roots_.begin();
  at::Tensor& known = errors_[static_cast<std::size_t>(which)]->energies;
  if (!known.defined()) {
    const auto probe = probe_.lock();
    std::vector<at::Tensor> energies;
    for (const int bits : probe->widths(site_, *root)) {
      const at::Tensor folded = comeback_.with([&](const Leaf& leaf) {
        return &root_of(leaf.site) == root ? probe->folded(leaf, bits, probe->next_key())
                                           : at::Tensor();
      });
      energies.push_back(
          energies_by_row(*call_->op, call_->arguments, difference(folded, comeback_.tensor)));
    }
    known = at::stack(energies);
  }
  return known;
}

at::Tensor NotKept::read() {
  if (const auto probe = probe_.lock()) probe->read_begins(nullptr);
  TORCH_CHECK(false, "backfold: this pass of a probe has no backward");
}

at::Tensor Watched::read() {
  if (const auto probe = probe_.lock()) probe->read_begins(nullptr);
  return tensor_;
}

at::Tensor StartedFrom::read() {
  const auto probe = probe_.lock();
  if (!probe) return tensor_;
  probe->read_begins(nullptr);
  probe->starts().read(number_);
  return probe->start_folded(site_, tensor_);
}

at::Tensor FoldedLater::read() {
  const auto probe = probe_.lock();
  return probe ? probe->folded_only(comeback_) : comeback_.tensor;
}

}  // namespace backfold::torch_layer
