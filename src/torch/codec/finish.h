// SPDX-License-Identifier: Apache-2.0
//
// Decoding a packet and making another tensor of its values in the same pass.

#ifndef BACKFOLD_TORCH_CODEC_FINISH_H_
#define BACKFOLD_TORCH_CODEC_FINISH_H_

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "backfold/epilogue.h"
#include "torch/codec/codec.h"
#include "torch/reads/norms.h"

namespace backfold::torch_layer {

// What is done to decoded values, in this order. Tensors are in the memory order of the packet.
struct Finish {
  std::optional<Normalisation> norm;
  at::Tensor weight, bias;  // by column, fp32; undefined: none
  std::int64_t run = 1, columns = 0;
  struct Operation {
    Step step;          // without memory
    at::Tensor tensor;  // its operand, or payload of the predicate that masks
  };
  std::vector<Operation> steps;
};

// `packed_by` is how the values were normalised before they were packed, if they were. None where
// the core has no kernel for it.
std::optional<at::Tensor> unpack_finished(const at::Tensor& payload, const GroupFormat& format,
                                          const std::optional<Normalisation>& packed_by,
                                          const Finish& finish, at::ScalarType type);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_CODEC_FINISH_H_
