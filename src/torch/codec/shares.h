// SPDX-License-Identifier: Apache-2.0
//
// Logarithms of shares that add up to 1, as log-softmax makes them.
//
// Backward exponentiates them. Noise in a logarithm makes the share larger on average, by half its
// variance, in every row alike: the errors of a batch add up instead of cancelling. Subtracting
// what the shares add up to takes most of that away.

#ifndef BACKFOLD_TORCH_CODEC_SHARES_H_
#define BACKFOLD_TORCH_CODEC_SHARES_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace backfold::torch_layer {

// Rounded logarithms, whose shares add up to 1 along `dim` again. In place; a few rows at a time,
// as the exponentials take as much memory as the rows. Rows that do not add up to a number stay as
// they are: an impossible class may come back as no number.
void restore_sums(const at::Tensor& logarithms, std::int64_t dim);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_CODEC_SHARES_H_
