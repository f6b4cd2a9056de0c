// SPDX-License-Identifier: Apache-2.0

#ifndef BACKFOLD_TORCH_STORE_COUNTER_H_
#define BACKFOLD_TORCH_STORE_COUNTER_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace backfold::torch_layer {

// Autograd's count of writes to a tensor and its views, and where it stood. Taken from the user's
// own tensor: one without history (`tensor_data()`) begins a count of its own.
struct Counter {
  Counter() = default;
  explicit Counter(const at::Tensor& tensor)
      : count(tensor.unsafeGetTensorImpl()->version_counter()), stood_at(now()) {}

  // 0 for a tensor that has none (inference mode).
  std::uint32_t now() const { return count.enabled() ? count.current_version() : 0; }
  bool moved() const { return now() != stood_at; }

  c10::VariableVersion count = c10::VariableVersion(c10::VariableVersion::DISABLED);
  std::uint32_t stood_at = 0;
};

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_STORE_COUNTER_H_
