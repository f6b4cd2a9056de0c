// SPDX-License-Identifier: Apache-2.0

#include "torch/reads/recipes.h"

#include <ATen/Context.h>
#include <ATen/Functions.h>

#include <algorithm>

#include "torch/reads/exact_ops_rows.h"

namespace backfold::torch_layer {
namespace {

using Fused = Recipe::Fused;
using OnRounded = Recipe::OnRounded;

bool is_training(const Call& call) {
  const c10::IValue& training = call["training"];
  return !training.isBool() || training.toBool();
}

// Dropout that drops something, on a device whose kernel keeps a mask.
bool drops(const Call& call) {
  const c10::IValue& train = call["train"];
  return train.isNone() || (train.isBool() && train.toBool());
}

// Attention whose second run needs no random numbers.
bool drops_nothing(const Call& call) { return equals(call["dropout_p"], 0); }

// While cuDNN tries kernels out, a second run may have another one.
bool has_one_kernel(const Call& call) {
  return !call["input"].toTensor().is_cuda() || !at::globalContext().benchmarkCuDNN();
}

// Squares and cubes: what norms and GELUs written out by hand take.
bool is_small_power(const Call& call) {
  const c10::IValue& exponent = call["exponent"];
  return equals(exponent, 2) || equals(exponent, 3);
}

// Leaky ReLU whose result has the sign of its argument.
bool has_rising_slopes(const Call& call) {
  const c10::IValue& slope = call["negative_slope"];
  return slope.isScalar() && slope.toScalar().toDouble() >= 0;
}

constexpr Recipe in_place(std::string_view op, std::string_view again,
                          std::string_view exact = {}) {
  return {.op = op, .again = again, .exact = exact};
}

constexpr Recipe norm(std::string_view op, int statistics, std::string_view left_out = {}) {
  return {.op = op,
          .exact = "weight bias",
          .left_out = left_out,
          .on_rounded = OnRounded::kStatistics,
          .first_companion = 1,
          .companions = statistics,
          .fused = Fused::kNorm,
          .when = is_training};
}

constexpr Recipe product(std::string_view op, std::string_view exact = {},
                         bool (*when)(const Call&) = nullptr) {
  return {.op = op, .exact = exact, .product = true, .when = when};
}

constexpr std::string_view kRunning = "running_mean running_var";

constexpr Recipe kRecipes[] = {
    // Activations. Those with a kink need its exact side, which only ReLU's own bits tell.
    {.op = "aten::gelu", .fused = Fused::kGelu},
    {.op = "aten::gelu_", .again = "aten::gelu", .fused = Fused::kGelu},
    {.op = "aten::silu", .fused = Fused::kSilu},
    {.op = "aten::silu_", .again = "aten::silu", .fused = Fused::kSilu},
    {.op = "aten::sigmoid", .fused = Fused::kSigmoid},
    {.op = "aten::sigmoid_", .again = "aten::sigmoid", .fused = Fused::kSigmoid},
    {.op = "aten::tanh", .fused = Fused::kTanh},
    {.op = "aten::tanh_", .again = "aten::tanh", .fused = Fused::kTanh},
    {"aten::softplus"},
    {"aten::mish"},
    in_place("aten::mish_", "aten::mish"),
    {"aten::elu"},
    in_place("aten::elu_", "aten::elu"),
    {"aten::celu"},
    in_place("aten::celu_", "aten::celu"),
    {"aten::hardswish"},
    in_place("aten::hardswish_", "aten::hardswish"),
    {"aten::log_sigmoid_forward"},
    {.op = "aten::relu", .on_rounded = OnRounded::kBits, .fused = Fused::kMask},
    {.op = "aten::relu_",
     .again = "aten::relu",
     .on_rounded = OnRounded::kBits,
     .fused = Fused::kMask},
    {.op = "aten::leaky_relu", .on_rounded = OnRounded::kBits, .when = has_rising_slopes},
    {.op = "aten::leaky_relu_",
     .again = "aten::leaky_relu",
     .on_rounded = OnRounded::kBits,
     .when = has_rising_slopes},
    {.op = "aten::hardtanh", .exact = "*"},
    in_place("aten::hardtanh_", "aten::hardtanh", "*"),
    {.op = "aten::hardsigmoid", .exact = "*"},
    in_place("aten::hardsigmoid_", "aten::hardsigmoid", "*"),
    {.op = "aten::_prelu_kernel", .exact = "*"},
    {.op = "aten::threshold", .exact = "*"},
    {.op = "aten::clamp", .exact = "*"},
    {.op = "aten::clamp_min", .exact = "*"},
    {.op = "aten::clamp_max", .exact = "*"},
    {.op = "aten::abs", .exact = "*"},

    // Arithmetic. Noise of a divisor, in an exponent or under a root is not only noise.
    {.op = "aten::add", .fused = Fused::kSum},
    {.op = "aten::add_", .again = "aten::add", .fused = Fused::kSum},
    {.op = "aten::sub", .fused = Fused::kDifference},
    {.op = "aten::sub_", .again = "aten::sub", .fused = Fused::kDifference},
    {.op = "aten::rsub", .fused = Fused::kReverseDifference},
    {.op = "aten::mul", .fused = Fused::kProduct},
    {.op = "aten::mul_", .again = "aten::mul", .fused = Fused::kProduct},
    {.op = "aten::div", .exact = "other", .fused = Fused::kQuotient},
    {.op = "aten::div_", .again = "aten::div", .exact = "other", .fused = Fused::kQuotient},
    {.op = "aten::neg", .fused = Fused::kNegative},
    {.op = "aten::neg_", .again = "aten::neg", .fused = Fused::kNegative},
    {.op = "aten::pow", .fused = Fused::kPower, .when = is_small_power},
    {.op = "aten::square", .fused = Fused::kPower},
    {.op = "aten::exp", .exact = "*"},
    {.op = "aten::rsqrt", .exact = "*"},
    {.op = "aten::sqrt", .exact = "*"},
    {.op = "aten::reciprocal", .exact = "*"},
    {.op = "aten::sin", .exact = "*"},
    {.op = "aten::cos", .exact = "*"},
    {"aten::addcmul"},
    {"aten::lerp"},
    {"aten::glu"},

    // Norms.
    norm("aten::native_layer_norm", 2),
    norm("aten::_fused_rms_norm", 1),
    norm("aten::native_group_norm", 2),
    norm("aten::native_batch_norm", 2, kRunning),
    norm("aten::_native_batch_norm_legit", 2, kRunning),
    norm("aten::cudnn_batch_norm", 2, kRunning),

    // Choices by an exact mask.
    {.op = "aten::native_dropout",
     .first_companion = 1,
     .companions = 1,
     .fused = Fused::kMask,
     .when = drops},
    {.op = "aten::where", .exact = "condition"},
    {.op = "aten::masked_fill", .exact = "mask"},
    in_place("aten::masked_fill_", "aten::masked_fill", "mask"),

    // Copies and arrangements.
    {.op = "aten::_to_copy", .fused = Fused::kCast},
    {"aten::clone"},
    {"aten::cat"},
    {"aten::stack"},
    {"aten::roll"},
    {"aten::flip"},
    {"aten::constant_pad_nd"},
    {"aten::reflection_pad1d"},
    {"aten::reflection_pad2d"},
    {"aten::reflection_pad3d"},
    {"aten::replication_pad1d"},
    {"aten::replication_pad2d"},
    {"aten::replication_pad3d"},
    {"aten::repeat"},
    {.op = "aten::index_select", .exact = "index"},
    {.op = "aten::gather", .exact = "index"},
    {.op = "aten::index", .exact = "indices"},
    {.op = "aten::embedding", .exact = "indices"},

    // Maps of another size.
    {.op = "aten::max_pool2d_with_indices",
     .on_rounded = OnRounded::kIndices,
     .first_companion = 1,
     .companions = 1},
    {"aten::avg_pool2d"},
    {"aten::upsample_nearest2d"},
    {"aten::upsample_bilinear2d"},

    // Products. Softmax of rounded values is biased.
    product("aten::mm"),
    product("aten::addmm"),
    product("aten::bmm"),
    product("aten::baddbmm"),
    product("aten::convolution", {}, has_one_kernel),
    product("aten::_scaled_dot_product_flash_attention", "*", drops_nothing),
    product("aten::_scaled_dot_product_flash_attention_for_cpu", "*", drops_nothing),
    product("aten::_scaled_dot_product_efficient_attention", "*", drops_nothing),
    product("aten::_scaled_dot_product_cudnn_attention", "*", drops_nothing),
    product("aten::_softmax", "*"),
    product("aten::_safe_softmax", "*"),
    product("aten::_log_softmax", "*"),
};

at::Tensor by_dropout(const RecipeInputs& inputs) {
  const Call call(inputs.schema, inputs.arguments);
  const at::Tensor input = call["input"].toTensor();
  return at::native_dropout_backward(input, inputs.companions[0],
                                     dropout_scale(call, input.scalar_type()));
}

// (x - mean) * rstd * weight + bias in fp32, or in fp64 for that type, in x's layout and type.
at::Tensor by_statistics(const RecipeInputs& inputs) {
  const Call call(inputs.schema, inputs.arguments);
  const at::Tensor x = call["input"].toTensor();
  at::Tensor rstd = inputs.companions.back();
  at::Tensor mean = inputs.companions.size() == 2 ? inputs.companions[0] : at::Tensor();
  const auto optional = [&](const char* name) {
    const c10::IValue& value = call[name];
    return value.isTensor() ? value.toTensor() : at::Tensor();
  };
  at::Tensor weight = optional("weight"), bias = optional("bias");
  c10::SmallVector<std::int64_t, 6> rows(static_cast<std::size_t>(x.dim()), 1), columns = rows;
  at::Tensor values = x;
  if (call["group"].isInt()) {
    // Rows are groups of channels: one dimension more.
    const std::int64_t groups = call["group"].toInt();
    values = x.unflatten(1, {groups, x.size(1) / groups});
    rows.assign(static_cast<std::size_t>(values.dim()), 1);
    rows[0] = x.size(0);
    rows[1] = groups;
    columns[1] = x.size(1);
  } else if (call["normalized_shape"].isNone()) {
    rows[1] = columns[1] = x.size(1);
  } else {
    const auto inside = call["normalized_shape"].toListRef().size();
    for (std::size_t i = 0; i < rows.size(); ++i)
      (i < rows.size() - inside ? rows : columns)[i] = x.size(static_cast<std::int64_t>(i));
  }
  const at::ScalarType type = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor y =
      mean.defined() ? values.to(type).sub(mean.to(type).reshape(rows)) : values.to(type);
  y = y.mul(rstd.to(type).reshape(rows));
  if (call["group"].isInt()) y = y.reshape(x.sizes());
  if (weight.defined()) y.mul_(weight.to(type).reshape(columns));
  if (bias.defined()) y.add_(bias.to(type).reshape(columns));
  return y;
}

at::Tensor by_bits(const RecipeInputs& inputs) {
  const at::Tensor& x = inputs.arguments[0].toTensor();
  const c10::IValue& slope = Call(inputs.schema, inputs.arguments)["negative_slope"];
  if (slope.isNone()) return at::where(inputs.bits > 0, x, 0);
  return at::where(inputs.bits > 0, x, x * slope.toScalar());
}

at::Tensor by_indices(const RecipeInputs& inputs) {
  const at::Tensor& indices = inputs.companions[0];
  const at::Tensor input = inputs.arguments[0].toTensor().flatten(-2);
  return input.gather(-1, indices.flatten(-2)).reshape(indices.sizes());
}

}  // namespace

double dropout_scale(const Call& call, at::ScalarType type) {
  // As the kernel computes it, in fp32 but for fp64: the share that stays is rounded first.
  const double stays = 1 - call["p"].toDouble();
  if (stays == 0) return 0;
  return type == at::kDouble ? 1 / stays : static_cast<float>(1.0 / static_cast<float>(stays));
}

const Recipe* recipe_of(std::string_view op) {
  const auto* found = std::find_if(std::begin(kRecipes), std::end(kRecipes),
                                   [&](const Recipe& recipe) { return recipe.op == op; });
  return found == std::end(kRecipes) ? nullptr : found;
}

at::Tensor made_by_recipe(const RecipeInputs& inputs, bool rounded) {
  if (inputs.recipe.op == "aten::native_dropout") return by_dropout(inputs);
  if (!rounded) return {};
  switch (inputs.recipe.on_rounded) {
    case OnRounded::kSame:
      return {};
    case OnRounded::kStatistics:
      return by_statistics(inputs);
    case OnRounded::kIndices:
      return by_indices(inputs);
    case OnRounded::kBits:
      return by_bits(inputs);
  }
  return {};
}

}  // namespace backfold::torch_layer
