// SPDX-License-Identifier: Apache-2.0
//
// What a codec that the user named makes of a tensor: its format, from sizes and strides.

#ifndef BACKFOLD_TORCH_CODEC_CODING_H_
#define BACKFOLD_TORCH_CODEC_CODING_H_

#include <ATen/core/Tensor.h>

#include <array>
#include <string>
#include <variant>

#include "backfold/codecs.h"
#include "torch/codec/codec.h"

namespace backfold::torch_layer {

// Who saves a tensor, as far as codecs care.
struct Saver {
  std::string_view op;             // its name; empty where nobody knows
  bool tanh = false;               // of GELU: the approximation by tanh
  std::array<double, 8> shares{};  // of samples at each of kSampleWidths; all 0 for one width
};

// Why a codec is not for a tensor, as the end of a sentence ("takes tensors of 3 to 5 dimensions,
// got
// ..."). One that is only too small is the right kind of tensor.
struct Misfit {
  std::string why;
  bool only_small = false;
};

using Coding = std::variant<Format, Misfit>;

// The tensor is dense. Codecs without a format (Exact, Keep) are no business of this function.
Coding coding_for(const Codec& codec, const at::Tensor& tensor, const Saver& saver, const Key& key);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_CODEC_CODING_H_
