// SPDX-License-Identifier: Apache-2.0
//
// Functions of other libraries whose backward was reviewed. All others stay exact: a fused kernel
// saves log-sum-exps, statistics and finished gradients beside its activations, and only its source
// tells which is which.
//
// A function is known by the name of its class alone, so a row must hold for every function of that
// name. It covers only tensors that every version saves in the same place and that are never
// optional, and checks their type if that tells them from the rest.

#include <ATen/core/Tensor.h>

#include <iterator>
#include <string_view>

#include "torch/reads/exact_ops_rows.h"

namespace backfold::torch_layer {
namespace {

constexpr std::string_view kProduct = "it enters a product with a gradient";
constexpr std::string_view kSmooth = "backward takes a smooth derivative at it";
constexpr std::string_view kLinear = "it enters linearly";
constexpr std::string_view kRunsAgain = "backward runs the forward again from it";
constexpr std::string_view kNoActivation = "backward runs again from it, and it has no gradient";

// flash-attention takes no other types, and its log-sum-exp never has one of them.
bool is_half(const Call&, const at::Tensor& saved) {
  return saved.scalar_type() == at::kHalf || saved.scalar_type() == at::kBFloat16;
}

// Masks, positions and indices have no gradient. They are small, and a mask may be infinite.
bool is_activation(const Call&, const at::Tensor& saved) {
  return saved.requires_grad() && saved.is_floating_point();
}

constexpr Rule of_function(std::string_view name, std::string_view slot, Reads reads,
                           std::string_view reason, int bits = 0,
                           bool (*when)(const Call&, const at::Tensor&) = nullptr) {
  return {.op = name, .slot = slot, .reads = reads, .reason = reason, .bits = bits, .when = when};
}

constexpr Rule values(std::string_view name, std::string_view slot, std::string_view reason) {
  return of_function(name, slot, Reads::kValues, reason);
}

constexpr Rule kFunctionRows[] = {
    // flash-attn 2 to 4 save q, k, v, out, log-sum-exp, ..., like torch's own fused attention.
    of_function("FlashAttnFunc", "saved.0", Reads::kFinely, kLogits, 6, is_half),
    of_function("FlashAttnFunc", "saved.1", Reads::kFinely, kLogits, 6, is_half),
    of_function("FlashAttnFunc", "saved.2", Reads::kValues, kLinear, 0, is_half),
    of_function("FlashAttnFunc", "saved.3", Reads::kValues, kLinear, 0, is_half),
    of_function("FlashAttnVarlenFunc", "saved.0", Reads::kFinely, kLogits, 6, is_half),
    of_function("FlashAttnVarlenFunc", "saved.1", Reads::kFinely, kLogits, 6, is_half),
    of_function("FlashAttnVarlenFunc", "saved.2", Reads::kValues, kLinear, 0, is_half),
    of_function("FlashAttnVarlenFunc", "saved.3", Reads::kValues, kLinear, 0, is_half),

    // Liger: silu(a) * b and gelu(a) * b save a and b. (There are no rows for its norms, which
    // multiply noise by rstd, and its losses, which save finished gradients.)
    values("LigerSiLUMulFunction", "saved.0", kSmooth),
    values("LigerSiLUMulFunction", "saved.1", kProduct),
    values("LigerGELUMulFunction", "saved.0", kSmooth),
    values("LigerGELUMulFunction", "saved.1", kProduct),

    // Activations that save their input: EfficientNet's and MONAI's swish, BLOOM's and Megatron's
    // gelu.
    values("SwishImplementation", "saved.0", kSmooth),
    values("GeLUFunction", "saved.0", kSmooth),

    // DeBERTa's masked softmax saves its result and uses torch's own formula.
    values("XSoftmax", "saved.0", kProduct),

    // Linear layers of DeepSpeed and Megatron save input, weight, ...
    values("LinearFunctionForZeroStage3", "saved.0", kProduct),
    values("LinearWithGradAccumulationAndAsyncCommunication", "saved.0", kProduct),

    // What torch.utils.checkpoint starts again from: the reentrant variant, the other one up to
    // torch 2.12, and later ones, which save outside of any call (checkpoint_operator()).
    of_function("CheckpointFunction", "*", Reads::kStart, kRunsAgain, 0, is_activation),
    of_function("CheckpointFunction", "*", Reads::kExactly, kNoActivation),
    of_function("_NoopSaveInputs", "*", Reads::kStart, kRunsAgain, 0, is_activation),
    of_function("_NoopSaveInputs", "*", Reads::kExactly, kNoActivation),
    of_function(kCheckpoint, "*", Reads::kStart, kRunsAgain, 0, is_activation),
    of_function(kCheckpoint, "*", Reads::kExactly, kNoActivation),
};

}  // namespace

c10::ArrayRef<Rule> function_rules() { return kFunctionRows; }

}  // namespace backfold::torch_layer
