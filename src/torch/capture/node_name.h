// SPDX-License-Identifier: Apache-2.0
//
// Names of backward nodes, as Node::name() has them.

#ifndef BACKFOLD_TORCH_CAPTURE_NODE_NAME_H_
#define BACKFOLD_TORCH_CAPTURE_NODE_NAME_H_

#include <torch/csrc/autograd/function.h>

#include <string_view>

namespace backfold::torch_layer {

// Whether a node is one of torch's own, made from its derivative formulas.
bool is_builtin(const torch::autograd::Node& node);

// Whether `name` is one of `names`, which are separated by spaces.
bool is_one_of(std::string_view name, std::string_view names);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_CAPTURE_NODE_NAME_H_
