// SPDX-License-Identifier: Apache-2.0
//
// Tensors whose rounded values would give a wrong gradient: backward divides by them, compares or
// exponentiates them, or needs them within a narrow domain.

#include <ATen/core/Tensor.h>

#include <cmath>
#include <iterator>
#include <string_view>
#include <vector>

#include "torch/reads/exact_ops_rows.h"

namespace backfold::torch_layer {
namespace {

constexpr std::string_view kFactor = "backward solves with this factor";
constexpr std::string_view kStatistic = "a statistic that backward scales every element with";
constexpr std::string_view kTotal = "a sum that backward divides by";
constexpr std::string_view kLogSum = "a log-sum-exp that backward subtracts in an exponent";
constexpr std::string_view kBias = "backward adds it in an exponent";
constexpr std::string_view kCoordinates = "backward rounds it to positions";
constexpr std::string_view kOpaque = "bytes in a private format of the library that made them";
constexpr std::string_view kFilledLater = "the operator writes it after saving it";
constexpr std::string_view kMask = "backward selects by it";

// The gradient of the 2-norm is x / norm, linear in x; other norms take signs, powers or maxima.
bool is_no_2_norm(const Call& call, const at::Tensor&) {
  const c10::IValue& p = call["p"];
  const c10::IValue& ord = call["ord"];
  const bool by_default = call["self"].isTensor() && p.isNone() && ord.isNone();
  return !by_default && !equals(p, 2.0) && !equals(ord, 2.0);
}

// Among the results of fused attention, only the output has query's type and number of dimensions,
// and enters backward linearly. The order of saving does not tell: it depends on which results are
// undefined.
bool is_no_attention_output(const Call& call, const at::Tensor& saved) {
  const c10::IValue& query = call["query"];
  return !query.isTensor() || saved.scalar_type() != query.toTensor().scalar_type() ||
         saved.dim() != query.toTensor().dim();
}

// Attention that does not divide its logits by the square root of the head's size, like Gemma 4
// with 512 channels and a scale of 1. Its logits are larger by that factor, and so is the effect of
// noise on their exponentials (an error of 5 at fresh weights, 8 bits).
bool has_large_logits(const Call& call, const at::Tensor& saved) {
  const c10::IValue& scale = call["scale"];
  if (!scale.isDouble() || saved.dim() == 0) return false;
  return scale.toDouble() * std::sqrt(static_cast<double>(saved.size(-1))) > 2;
}

bool is_output_of_large_logits(const Call& call, const at::Tensor& saved) {
  return has_large_logits(call, saved) && !is_no_attention_output(call, saved);
}

// Adds what attention with large logits needs. A softmax of large logits picks one value: its
// output is that value, and backward takes the difference of their products with the gradient,
// which is close to zero (an error of 0.8 at 4 bits from these two alone).
void add_large_logits(const Rule& row, std::vector<Rule>& rows) {
  constexpr int kBits = 16;
  constexpr std::string_view kDifference = "backward takes a small difference of its products";
  Rule fine = row;
  fine.bits = kBits;
  fine.when = has_large_logits;
  rows.push_back(fine);
  if (row.slot != "query") return;
  fine = finely(row.op, "value", kBits, kDifference);
  fine.when = has_large_logits;
  rows.push_back(fine);
  fine = finely(row.op, "result", kBits, kDifference);
  fine.when = is_output_of_large_logits;
  rows.push_back(fine);
}

constexpr Rule kValueRows[] = {
    // Statistics of the norms. running_mean and running_var are read outside of training.
    exactly("aten::native_layer_norm", "result", kStatistic),
    exactly("aten::native_layer_norm_backward", "mean", kStatistic),
    exactly("aten::native_layer_norm_backward", "rstd", kStatistic),
    exactly("aten::native_group_norm", "result", kStatistic),
    exactly("aten::_fused_rms_norm", "result", kStatistic),
    exactly("aten::native_batch_norm", "result", kStatistic),
    exactly("aten::native_batch_norm", "running_mean", kStatistic),
    exactly("aten::native_batch_norm", "running_var", kStatistic),
    exactly("aten::native_batch_norm_backward", "running_mean", kStatistic),
    exactly("aten::native_batch_norm_backward", "running_var", kStatistic),
    exactly("aten::native_batch_norm_backward", "save_mean", kStatistic),
    exactly("aten::native_batch_norm_backward", "save_invstd", kStatistic),
    exactly("aten::_native_batch_norm_legit", "result", kStatistic),
    exactly("aten::_native_batch_norm_legit", "running_mean", kStatistic),
    exactly("aten::_native_batch_norm_legit", "running_var", kStatistic),
    exactly("aten::_native_batch_norm_legit_no_training", "result", kStatistic),
    exactly("aten::_native_batch_norm_legit_no_training", "running_mean", kStatistic),
    exactly("aten::_native_batch_norm_legit_no_training", "running_var", kStatistic),
    exactly("aten::_batch_norm_with_update", "result", kStatistic),
    exactly("aten::_batch_norm_with_update", "running_mean", kStatistic),
    exactly("aten::_batch_norm_with_update", "running_var", kStatistic),
    exactly("aten::_batch_norm_no_update", "result", kStatistic),
    exactly("aten::_batch_norm_no_update", "running_mean", kStatistic),
    exactly("aten::_batch_norm_no_update", "running_var", kStatistic),
    exactly("aten::batch_norm_backward", "running_mean", kStatistic),
    exactly("aten::batch_norm_backward", "running_var", kStatistic),
    exactly("aten::batch_norm_backward", "save_mean", kStatistic),
    exactly("aten::batch_norm_backward", "save_var", kStatistic),
    exactly("aten::batch_norm_backward", "reserve", kOpaque),
    exactly("aten::cudnn_batch_norm", "result", kStatistic),
    exactly("aten::cudnn_batch_norm", "running_mean", kStatistic),
    exactly("aten::cudnn_batch_norm", "running_var", kStatistic),
    exactly("aten::cudnn_batch_norm_backward", "running_mean", kStatistic),
    exactly("aten::cudnn_batch_norm_backward", "running_var", kStatistic),
    exactly("aten::cudnn_batch_norm_backward", "save_mean", kStatistic),
    exactly("aten::cudnn_batch_norm_backward", "save_var", kStatistic),
    exactly("aten::cudnn_batch_norm_backward", "reserveSpace", kOpaque),
    exactly("aten::miopen_batch_norm", "result", kStatistic),
    exactly("aten::miopen_batch_norm", "running_mean", kStatistic),
    exactly("aten::miopen_batch_norm", "running_var", kStatistic),
    exactly("aten::miopen_batch_norm_backward", "running_mean", kStatistic),
    exactly("aten::miopen_batch_norm_backward", "running_var", kStatistic),
    exactly("aten::miopen_batch_norm_backward", "save_mean", kStatistic),
    exactly("aten::miopen_batch_norm_backward", "save_var", kStatistic),

    // Fused attention: backward recomputes P = exp(scale * query key^T + bias - log-sum-exp).
    finely("aten::_scaled_dot_product_flash_attention", "query", 6, kLogits),
    finely("aten::_scaled_dot_product_flash_attention", "key", 6, kLogits),
    exactly("aten::_scaled_dot_product_flash_attention", "result", kLogSum, is_no_attention_output),
    finely("aten::_scaled_dot_product_flash_attention_for_cpu", "query", 6, kLogits),
    finely("aten::_scaled_dot_product_flash_attention_for_cpu", "key", 6, kLogits),
    exactly("aten::_scaled_dot_product_flash_attention_for_cpu", "attn_mask", kBias),
    exactly("aten::_scaled_dot_product_flash_attention_for_cpu", "result", kLogSum,
            is_no_attention_output),
    finely("aten::_scaled_dot_product_efficient_attention", "query", 6, kLogits),
    finely("aten::_scaled_dot_product_efficient_attention", "key", 6, kLogits),
    exactly("aten::_scaled_dot_product_efficient_attention", "attn_bias", kBias),
    exactly("aten::_scaled_dot_product_efficient_attention", "result", kLogSum,
            is_no_attention_output),
    finely("aten::_scaled_dot_product_cudnn_attention", "query", 6, kLogits),
    finely("aten::_scaled_dot_product_cudnn_attention", "key", 6, kLogits),
    exactly("aten::_scaled_dot_product_cudnn_attention", "attn_bias", kBias),
    exactly("aten::_scaled_dot_product_cudnn_attention", "result", kLogSum, is_no_attention_output),
    finely("aten::_scaled_dot_product_fused_attention_overrideable", "query", 6, kLogits),
    finely("aten::_scaled_dot_product_fused_attention_overrideable", "key", 6, kLogits),
    exactly("aten::_scaled_dot_product_fused_attention_overrideable", "attn_bias", kBias),
    exactly("aten::_scaled_dot_product_fused_attention_overrideable", "result", kLogSum,
            is_no_attention_output),
    finely("aten::_flash_attention_forward", "query", 6, kLogits),
    finely("aten::_flash_attention_forward", "key", 6, kLogits),
    exactly("aten::_flash_attention_forward", "result", kLogSum, is_no_attention_output),
    finely("aten::_efficient_attention_forward", "query", 6, kLogits),
    finely("aten::_efficient_attention_forward", "key", 6, kLogits),
    exactly("aten::_efficient_attention_forward", "bias", kBias),
    exactly("aten::_efficient_attention_forward", "result", kLogSum, is_no_attention_output),
    finely("aten::_cudnn_attention_forward", "query", 6, kLogits),
    finely("aten::_cudnn_attention_forward", "key", 6, kLogits),
    exactly("aten::_cudnn_attention_forward", "attn_bias", kBias),
    exactly("aten::_cudnn_attention_forward", "result", kLogSum, is_no_attention_output),

    // Softmax and the like. A rounded log-probability stays within its group's range, so its
    // exponential never exceeds 1; a rounded argument of logsumexp can exceed its row's largest.
    finely("aten::_log_softmax", "result", 6, kExponentiates),
    finely("aten::_log_softmax_backward_data", "output", 6, kExponentiates),
    exactly("aten::logsumexp", "*", kLogSum),
    exactly("aten::logcumsumexp", "*", kLogSum),
    exactly("aten::logaddexp", "*", kExponentiates),
    exactly("aten::logaddexp2", "*", kExponentiates),

    // Losses.
    exactly("aten::nll_loss_forward", "result", kTotal),
    exactly("aten::nll_loss2d_forward", "result", kTotal),
    exactly("aten::binary_cross_entropy", "self", kCancels),
    exactly("aten::binary_cross_entropy", "target", kCancels),
    exactly("aten::binary_cross_entropy_backward", "self", kCancels),
    exactly("aten::binary_cross_entropy_backward", "target", kCancels),
    exactly("aten::smooth_l1_loss", "*", kSignOf),
    exactly("aten::smooth_l1_loss_backward", "self", kSignOf),
    exactly("aten::smooth_l1_loss_backward", "target", kSignOf),
    exactly("aten::huber_loss", "*", kSignOf),
    exactly("aten::huber_loss_backward", "self", kSignOf),
    exactly("aten::huber_loss_backward", "target", kSignOf),
    exactly("aten::soft_margin_loss", "*", kExponentiates),
    exactly("aten::soft_margin_loss_backward", "self", kExponentiates),
    exactly("aten::soft_margin_loss_backward", "target", kExponentiates),
    exactly("aten::multi_margin_loss", "self", kCompares),
    exactly("aten::multilabel_margin_loss_forward", "*", kCompares),
    exactly("aten::_ctc_loss", "*", kExponentiates),
    exactly("aten::_cudnn_ctc_loss", "result.0", kCompares),
    exactly("aten::miopen_ctc_loss", "result.0", kCompares),

    // Selections: backward looks for the elements that equal the result.
    exactly("aten::amax", "*", kCompares),
    exactly("aten::amin", "*", kCompares),
    exactly("aten::aminmax", "*", kCompares),
    exactly("aten::max", "*", kCompares),
    exactly("aten::min", "*", kCompares),
    exactly("aten::median", "*", kCompares),
    exactly("aten::nanmedian", "*", kCompares),
    exactly("aten::maximum", "*", kCompares),
    exactly("aten::minimum", "*", kCompares),
    exactly("aten::fmax", "*", kCompares),
    exactly("aten::fmin", "*", kCompares),
    exactly("aten::_foreach_max", "*", kCompares),
    exactly("aten::segment_reduce", "*", kCompares),
    exactly("aten::max_pool2d", "*", kCompares),
    exactly("aten::mkldnn_max_pool2d", "*", kCompares),
    exactly("aten::mkldnn_max_pool3d", "*", kCompares),

    // Signs. rrelu's noise is saved before the kernel fills it.
    exactly("aten::rrelu_with_noise", "*", kFilledLater),
    exactly("aten::rrelu_with_noise_", "*", kFilledLater),
    exactly("aten::rrelu_with_noise_functional", "*", kMask),
    exactly("aten::_prelu_kernel", "*", kMask),
    exactly("aten::_prelu_kernel_backward", "self", kMask),
    exactly("aten::_fake_quantize_learnable_per_tensor_affine", "*", kMask),
    exactly("aten::_fake_quantize_learnable_per_channel_affine", "*", kMask),

    // Norms, distances and other quotients.
    exactly("aten::norm", "self", kSignOf, is_no_2_norm),
    exactly("aten::norm", "result", kDivides),
    exactly("aten::linalg_vector_norm", "self", kSignOf, is_no_2_norm),
    exactly("aten::linalg_vector_norm", "result", kDivides),
    exactly("aten::_foreach_norm", "*", kDivides),
    exactly("aten::dist", "*", kDivides),
    exactly("aten::_cdist_forward", "*", kDivides),
    exactly("aten::_euclidean_dist", "*", kDivides),
    exactly("aten::_pdist_forward", "*", kDivides),
    exactly("aten::_weight_norm_interface", "result", kDivides),
    exactly("aten::std", "result", kDivides),
    exactly("aten::std_mean", "result", kDivides),
    exactly("aten::prod", "*", kProducts),

    // Special functions.
    exactly("aten::special_entr", "*", kPoles),
    exactly("aten::special_erfcx", "*", kExponentiates),
    exactly("aten::special_i0e", "*", kSignOf),
    exactly("aten::special_i1", "*", kDivides),
    exactly("aten::special_i1e", "*", kDivides),
    exactly("aten::special_log_ndtr", "*", kExponentiates),
    exactly("aten::special_ndtri", "*", kExponentiates),
    exactly("aten::special_xlog1py", "*", kDivides),
    exactly("aten::special_zeta", "*", kPoles),
    exactly("aten::_standard_gamma", "*", kPoles),

    // Positions given as floating-point numbers.
    exactly("aten::grid_sampler_2d", "grid", kCoordinates),
    exactly("aten::grid_sampler_2d_backward", "grid", kCoordinates),
    exactly("aten::grid_sampler_3d", "grid", kCoordinates),
    exactly("aten::grid_sampler_3d_backward", "grid", kCoordinates),
    exactly("aten::_grid_sampler_2d_cpu_fallback", "grid", kCoordinates),
    exactly("aten::_grid_sampler_2d_cpu_fallback_backward", "grid", kCoordinates),
    exactly("aten::cudnn_grid_sampler", "grid", kCoordinates),
    exactly("aten::cudnn_grid_sampler_backward", "grid", kCoordinates),

    // Linear algebra: decompositions, inverses and solutions.
    exactly("aten::cholesky", "*", kFactor),
    exactly("aten::cholesky_inverse", "*", kFactor),
    exactly("aten::cholesky_solve", "*", kFactor),
    exactly("aten::linalg_cholesky_ex", "*", kFactor),
    exactly("aten::_linalg_det", "*", kFactor),
    exactly("aten::_linalg_slogdet", "*", kFactor),
    exactly("aten::_linalg_eigh", "*", kFactor),
    exactly("aten::linalg_eig", "*", kFactor),
    exactly("aten::linalg_householder_product", "*", kFactor),
    exactly("aten::linalg_inv_ex", "*", kFactor),
    exactly("aten::linalg_lstsq", "*", kFactor),
    exactly("aten::linalg_lu", "*", kFactor),
    exactly("aten::linalg_lu_factor_ex", "*", kFactor),
    exactly("aten::linalg_lu_solve", "*", kFactor),
    exactly("aten::linalg_matrix_exp", "*", kExponentiates),
    exactly("aten::linalg_pinv", "*", kFactor),
    exactly("aten::linalg_qr", "*", kFactor),
    exactly("aten::_linalg_solve_ex", "*", kFactor),
    exactly("aten::linalg_solve_triangular", "*", kFactor),
    exactly("aten::_linalg_svd", "*", kFactor),
    exactly("aten::ormqr", "*", kFactor),
    exactly("aten::triangular_solve", "*", kFactor),

    // Recurrent layers of cuDNN, MIOpen, oneDNN and MPS: reserves, workspaces and weight buffers.
    exactly("aten::_cudnn_rnn", "result", kOpaque),
    exactly("aten::_cudnn_rnn", "dropout_state", kOpaque),
    exactly("aten::miopen_rnn", "result", kOpaque),
    exactly("aten::miopen_rnn", "dropout_state", kOpaque),
    exactly("aten::mkldnn_rnn_layer", "result", kOpaque),
    exactly("aten::_lstm_mps", "result", kOpaque),
};

}  // namespace

std::vector<Rule> value_rules() {
  std::vector<Rule> rows;
  for (const Rule& row : kValueRows) {
    if (row.reason == kLogits) add_large_logits(row, rows);
    rows.push_back(row);
  }
  return rows;
}

}  // namespace backfold::torch_layer
