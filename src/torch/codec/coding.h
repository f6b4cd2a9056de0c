// SPDX-License-Identifier: Apache-2.0
//
// The format that a codec chosen by the user gives a tensor, from its sizes and strides.

#ifndef BACKFOLD_TORCH_CODEC_CODING_H_
#define BACKFOLD_TORCH_CODEC_CODING_H_

#include <ATen/core/Tensor.h>

#include <array>
#include <string>
#include <variant>

#include "backfold/codecs.h"
#include "torch/codec/codec.h"

namespace backfold::torch_layer {

// What codecs need to know about the operator that saves a tensor.
struct Saver {
  std::string_view op;             // its name; empty if unknown
  bool tanh = false;               // of GELU: the approximation by tanh
  std::array<double, 8> shares{};  // of samples at each of kSampleWidths; all 0 for one width
};

// Why a codec does not fit a tensor, as the end of a sentence ("takes tensors of 3 to 5 dimensions,
// got ..."). `only_small`: the tensor is of the right kind, but too small.
struct Misfit {
  std::string why;
  bool only_small = false;
};

using Coding = std::variant<Format, Misfit>;

// The tensor must be dense. Codecs without a format (Exact, Keep) never fit.
Coding coding_for(const Codec& codec, const at::Tensor& tensor, const Saver& saver, const Key& key);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_CODEC_CODING_H_
