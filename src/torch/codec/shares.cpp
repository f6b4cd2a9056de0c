// SPDX-License-Identifier: Apache-2.0

#include "torch/codec/shares.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

namespace backfold::torch_layer {
namespace {

constexpr std::int64_t kAtOnce = 1 << 24;  // elements

}  // namespace

void restore_sums(const at::Tensor& logarithms, std::int64_t dim) {
  if (logarithms.numel() == 0 || logarithms.dim() == 0) return;
  const at::AutoGradMode no_grad(false);
  dim = dim < 0 ? dim + logarithms.dim() : dim;
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
