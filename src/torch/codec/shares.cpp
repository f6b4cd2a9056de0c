// SPDX-License-Identifier: Apache-2.0

#include "torch/codec/shares.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>

#include "backfold/shares.h"
#include "torch/codec/codec.h"

namespace backfold::torch_layer {
namespace {

constexpr std::int64_t kAtOnce = 1 << 24;  // elements

// In one kernel, where there is one: rows one after the other on a GPU. Three of torch's would move
// five times the bytes.
bool restored_at_once(const at::Tensor& logarithms, std::int64_t dim) {
  const auto type = element_type(logarithms.scalar_type());
  if (!logarithms.is_cuda() || dim != logarithms.dim() - 1 || !logarithms.is_contiguous() ||
      !type || *type >= ElementType::kF64)
    return false;
  const c10::DeviceGuard guard(logarithms.device());
  const std::int64_t length = logarithms.size(dim);
  check(backfold::restore_sums(*type, logarithms.numel() / length, length,
                               logarithms.mutable_data_ptr(), execution_on(logarithms.device())));
  return true;
}

}  // namespace

void restore_sums(const at::Tensor& logarithms, std::int64_t dim) {
  if (logarithms.numel() == 0 || logarithms.dim() == 0) return;
  const at::AutoGradMode no_grad(false);
  dim = dim < 0 ? dim + logarithms.dim() : dim;
  if (restored_at_once(logarithms, dim)) return;
  std::int64_t across = -1;  // the longest dimension apart from that one
  for (std::int64_t i = 0; i < logarithms.dim(); ++i)
    if (i != dim && (across < 0 || logarithms.size(i) > logarithms.size(across))) across = i;
  const std::int64_t rows = across < 0 ? 1 : logarithms.size(across);
  const std::int64_t step = std::max<std::int64_t>(1, kAtOnce / (logarithms.numel() / rows));
  for (std::int64_t begin = 0; begin < rows; begin += step) {
    const at::Tensor part =
        across < 0 ? logarithms : logarithms.narrow(across, begin, std::min(step, rows - begin));
    // Logarithms of shares are about 0 at most, so nothing overflows. Rows with elements that are
    // no numbers stay as they are.
    part.sub_(part.exp().sum(dim, true).log_().nan_to_num_(0.0, 0.0, 0.0));
  }
}

}  // namespace backfold::torch_layer
