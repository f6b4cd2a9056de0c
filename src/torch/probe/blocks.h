// SPDX-License-Identifier: Apache-2.0
//
// Which elements of a gradient's error carry independent noise.
//
// The effect of an error D on the parameters is estimated by <D, a'>^2, with a' a random tangent.
// Taken block by block, where blocks are independent, most of the estimate's own noise goes away.

#ifndef BACKFOLD_TORCH_PROBE_BLOCKS_H_
#define BACKFOLD_TORCH_PROBE_BLOCKS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>

namespace backfold::torch_layer {

enum class Blocks : std::uint8_t {
  kRows,      // of the last dimension
  kColumns,   // everything but the last dimension but one
  kChannels,  // the second dimension
  kSamples,   // of the first dimension
};

// For the gradient of the argument `slot` of an operator.
Blocks blocks_of(std::string_view op, std::string_view slot);

// Sums of error * tangent over each block.
at::Tensor block_sums(const at::Tensor& error, const at::Tensor& tangent, Blocks blocks);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PROBE_BLOCKS_H_
