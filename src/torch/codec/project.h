// SPDX-License-Identifier: Apache-2.0
//
// Random projection: a codec of the torch layer, on top of the core's quantizer.
//
// x, rows x columns, is kept as x P in the group quantizer's codes. P is columns x kept, its
// entries are +-s (backfold/signs.h), so E[P P^T] = c I with c = kept s^2, and x P P^T / c is x on
// average. s is the power of two nearest to 1 / sqrt(kept). 1 / sqrt(kept) itself is rounded in
// 16-bit types, so c would not be 1 there either, and the product divides by c at no extra cost. P
// is not stored: the core makes it again from the key, in one launch. Per row
//
//   E |x P P^T / c - x|^2 = |x|^2 (columns - 1) / kept,
//
// and rounding adds its own squared error times columns / kept.
//
// Both products are torch's matrix multiply, in the type of the elements and with the precision
// that the user allows (TF32), so results of two devices agree closely, but not bit for bit. Beside
// x and its packet, x P and P are alive during the call. Both are at most as large as x, because
// the codec does not take tensors with fewer rows than P has columns.

#ifndef BACKFOLD_TORCH_CODEC_PROJECT_H_
#define BACKFOLD_TORCH_CODEC_PROJECT_H_

#include <ATen/core/Tensor.h>

#include "backfold/group.h"

namespace backfold::torch_layer {

struct ProjectFormat {
  GroupFormat codes;  // of x P
  std::int64_t rows = 0, columns = 0, kept = 0;
  Key key;  // of P
};

std::size_t packed_bytes(const ProjectFormat& format);

// x P for the elements at `source`, in memory of `device`, computed where `execution` says.
at::Tensor project(const ProjectFormat& format, const void* source, const at::Device& device,
                   const Execution& execution);

// Writes (x P) P^T / c to the memory of `result`, a dense tensor of rows * columns elements.
void project_back(const ProjectFormat& format, const at::Tensor& projected,
                  const at::Tensor& result, const Execution& execution);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_CODEC_PROJECT_H_
