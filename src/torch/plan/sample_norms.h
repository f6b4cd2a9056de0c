// SPDX-License-Identifier: Apache-2.0
//
// Gradient norms of single samples, by their ids in the data set.
//
// If the user says which samples a batch holds, a tensor kept with per_sample=True ranks them by
// range and by the norm of the gradient that each last had at this place. Norms are taken from the
// gradients as they pass through backward, and stay on the device.

#ifndef BACKFOLD_TORCH_PLAN_SAMPLE_NORMS_H_
#define BACKFOLD_TORCH_PLAN_SAMPLE_NORMS_H_

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "torch/codec/codec.h"

namespace backfold::torch_layer {

// Which samples of a data set a batch holds.
struct SampleIds {
  at::Tensor ids;          // int64, one for each row of the batch
  std::int64_t count = 0;  // of the data set
};

// Sets the weights of the next packet: squared norms, or their mean for samples without one.
// Returns whether the tensor has as many samples as there are ids.
bool weigh_samples(CodecMemory& memory, const SampleIds& samples, const at::Tensor& tensor);

// Stores the norms of the gradients that arrive at the node of `result` in the memories.
void watch_norms(const at::Tensor& result, std::vector<std::shared_ptr<CodecMemory>> memories,
                 const SampleIds& samples);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PLAN_SAMPLE_NORMS_H_
