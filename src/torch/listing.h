// SPDX-License-Identifier: Apache-2.0
//
// The model, as the layer above lists it: parts by identity and path, parameters and buffers by
// name.

#ifndef BACKFOLD_TORCH_LISTING_H_
#define BACKFOLD_TORCH_LISTING_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "torch/state.h"

namespace backfold::torch_layer {

struct ListedPart {
  const void* identity = nullptr;  // its address, which the caller keeps valid
  std::string path;
  bool keep = false;        // its tensors stay as they are
  std::uint64_t rules = 0;  // of the policy, that are for it: bits
};

struct ListedTensor {
  std::string name;
  at::Tensor tensor;
  bool buffer = false;
};

// Replaces what was listed before, and watches the gradients of the parameters from now on.
void list_model(State& state, const std::vector<ListedPart>& parts,
                const std::vector<ListedTensor>& tensors);

// Whether the next block should be told which parts run, which costs some microseconds for each:
// while places are learned, and where the user named some. Where a program compiles models it is
// only told for the latter: what watches parts is seen by compilers, which make a further graph.
bool wants_parts(State& state, bool compiles);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_LISTING_H_
