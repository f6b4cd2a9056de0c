// SPDX-License-Identifier: Apache-2.0

#include "torch/probe/blocks.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <array>
#include <vector>

namespace backfold::torch_layer {
namespace {

struct Row {
  std::string_view op, slot;  // an empty slot matches all
  Blocks blocks;
};

// An error in the second operand of a matrix product reaches whole columns of the first one's
// gradient, and an error in the input of batch norm a whole channel, through the statistics.
constexpr std::array kTable = {
    Row{"aten::mm", "self", Blocks::kColumns},
    Row{"aten::addmm", "mat1", Blocks::kColumns},
    Row{"aten::bmm", "self", Blocks::kColumns},
    Row{"aten::baddbmm", "batch1", Blocks::kColumns},
    Row{"aten::addbmm", "batch1", Blocks::kColumns},
    Row{"aten::native_batch_norm", "", Blocks::kChannels},
    Row{"aten::cudnn_batch_norm", "", Blocks::kChannels},
    Row{"aten::_native_batch_norm_legit", "", Blocks::kChannels},
    Row{"aten::_batch_norm_with_update", "", Blocks::kChannels},
    Row{"aten::batch_norm_elemt", "", Blocks::kChannels},
    Row{"aten::native_group_norm", "", Blocks::kChannels},
};

}  // namespace

Blocks blocks_of(std::string_view op, std::string_view slot) {
  for (const Row& row : kTable)
    if (row.op == op && (row.slot.empty() || row.slot == slot)) return row.blocks;
  return Blocks::kRows;
}

at::Tensor block_sums(const at::Tensor& error, const at::Tensor& tangent, Blocks blocks) {
  const at::Tensor product = error * tangent;
  const std::int64_t dim = product.dim();
  if (dim == 0) return product;
  if (blocks == Blocks::kColumns && dim >= 2) return product.sum(-2);
  if (blocks == Blocks::kChannels && dim >= 2) {
    std::vector<std::int64_t> others;
    for (std::int64_t i = 0; i < dim; ++i)
      if (i != 1) others.push_back(i);
    return product.sum(others);
  }
  if (blocks == Blocks::kSamples && dim >= 2) return product.flatten(1).sum(1);
  return product.sum(-1);
}

}  // namespace backfold::torch_layer
