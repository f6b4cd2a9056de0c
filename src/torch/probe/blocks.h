// SPDX-License-Identifier: Apache-2.0
//
// Which elements of a gradient's error carry independent noise.
//
// The effect of an error D on the parameters is estimated by <D, a'>^2, with a' a random tangent.
// If blocks are independent, summing the squares block by block removes most of the estimate's own
// noise.

#ifndef BACKFOLD_TORCH_PROBE_BLOCKS_H_
#define BACKFOLD_TORCH_PROBE_BLOCKS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>

namespace backfold::torch_layer {

enum class Blocks : std::uint8_t {
  kRows,      // a block per row of the last dimension
  kColumns,   // sums over the second to last dimension
  kChannels,  // a block per index of the second dimension
  kSamples,   // a block per index of the first dimension
};

// For the gradient of the argument `slot` of an operator.
Blocks blocks_of(std::string_view op, std::string_view slot);

// Sums of error * tangent over each block.
at::Tensor block_sums(const at::Tensor& error, const at::Tensor& tangent, Blocks blocks);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PROBE_BLOCKS_H_
