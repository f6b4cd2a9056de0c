// SPDX-License-Identifier: Apache-2.0
//
// Tensors of which backward reads only the result of one comparison per element.
//
// Bounds. torch compares fp16 and bf16 elements either as fp32 with the bound rounded to fp32
// (hardtanh), or in their own type with the bound rounded to it (clamp, the shrinks). Each row
// rounds as its kernel does.
//
// NaN. On the CPU, the vector loops of hardtanh_backward and of the shrinks' backward stop the
// gradient of a NaN. Their scalar loops, which handle the last elements and strided tensors, and
// the CUDA kernels let it pass. These rows let it pass. All other kernels agree with each other.

#include <ATen/core/Tensor.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <torch/version.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string_view>

#include "torch/reads/exact_ops_rows.h"

namespace backfold::torch_layer {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

bool is_real(c10::ScalarType type) {
  return type == c10::ScalarType::Float || type == c10::ScalarType::Double ||
         type == c10::ScalarType::Half || type == c10::ScalarType::BFloat16;
}

// Rounded to fp32, as the core does with a bound; fp64 is kept.
double to_fp32(c10::ScalarType type, double x) {
  return type == c10::ScalarType::Double ? x : static_cast<float>(x);
}

// Rounded to the type itself, via fp32 as torch does.
double to_type(c10::ScalarType type, double x) {
  if (type == c10::ScalarType::Half) return static_cast<float>(c10::Half(static_cast<float>(x)));
  if (type == c10::ScalarType::BFloat16) {
    return static_cast<float>(c10::BFloat16(static_cast<float>(x)));
  }
  return to_fp32(type, x);
}

// A number that fp64 can hold and that is not NaN.
bool read_number(const c10::IValue& value, double* number) {
  if (value.isDouble()) {
    *number = value.toDouble();
  } else if (value.isInt()) {
    constexpr std::int64_t kLargest = std::int64_t{1} << 53;
    const std::int64_t integer = value.toInt();
    if (integer < -kLargest || integer > kLargest) return false;
    *number = static_cast<double>(integer);
  } else if (value.isBool()) {
    *number = value.toBool() ? 1.0 : 0.0;
  } else {
    return false;
  }
  return !std::isnan(*number);
}

bool on_cpu(const c10::IValue& value) { return value.isTensor() && value.toTensor().is_cpu(); }

void fill(PredicateFormat* format, Comparison comparison, double low, double high, bool nan,
          double if_true, double if_false) {
  format->comparison = comparison;
  format->low = low;
  format->high = high;
  format->nan = nan;
  format->if_true = if_true;
  format->if_false = if_false;
}

// threshold_backward(grad, result, 0): x <= 0 stops the gradient, a NaN does not.
bool relu(const Call&, c10::ScalarType type, PredicateFormat* format) {
  fill(format, Comparison::kGreater, 0.0, 0.0, true, 1.0, 0.0);
  return is_real(type);
}

// leaky_relu_backward: x > 0 takes slope 1; all others, NaN included, take the other slope.
bool positive(const Call&, c10::ScalarType type, PredicateFormat* format) {
  fill(format, Comparison::kGreater, 0.0, 0.0, false, 1.0, 0.0);
  return is_real(type);
}

// threshold_backward: x <= threshold stops the gradient, a NaN does not. The CPU compares in fp32,
// CUDA in the element's type.
bool threshold(const Call& call, c10::ScalarType type, PredicateFormat* format) {
  double bound;
  if (!is_real(type) || !read_number(call["threshold"], &bound)) return false;
  bound = on_cpu(call["self"]) ? to_fp32(type, bound) : to_type(type, bound);
  if (bound == kInf) return false;  // only a NaN passes, and no number stands for it
  fill(format, Comparison::kGreater, bound, 0.0, true, kInf, -kInf);
  return true;
}

// A number of the type strictly between the bounds. False if none was found.
bool find_inside(c10::ScalarType type, double low, double high, double* inside) {
  for (const double candidate : {0.0, low / 2 + high / 2, low + 1, high - 1, 2 * low, 2 * high}) {
    *inside = to_type(type, candidate);
    if (low < *inside && *inside < high) return true;
  }
  return false;
}

// hardtanh_backward: x <= min or x >= max stops the gradient, compared in fp32.
bool hardtanh(const Call& call, c10::ScalarType type, PredicateFormat* format) {
  double low, high;
  if (!is_real(type) || !read_number(call["min_val"], &low) ||
      !read_number(call["max_val"], &high)) {
    return false;
  }
  low = to_fp32(type, low);
  high = to_fp32(type, high);
  double inside;
  if (!find_inside(type, low, high, &inside)) return false;
  fill(format, Comparison::kInsideOpen, low, high, true, inside, -kInf);
  return true;
}

// hardsigmoid_backward: -3 < x < 3 passes; a NaN does not.
bool hardsigmoid(const Call&, c10::ScalarType type, PredicateFormat* format) {
  fill(format, Comparison::kInsideOpen, -3.0, 3.0, false, 0.0, 3.0);
  return is_real(type);
}

// hardshrink_backward and softshrink_backward: -lambd <= x <= lambd stops the gradient, compared
// in the element's type.
bool shrink(const Call& call, c10::ScalarType type, PredicateFormat* format) {
  double bound;
  if (!is_real(type) || !read_number(call["lambd"], &bound)) return false;
  bound = to_type(type, bound);
  if (bound == kInf) return false;  // as in threshold()
  fill(format, Comparison::kInsideClosed, -bound, bound, false, 0.0, kInf);
  return true;
}

// An element equal to a bound of clamp passes its gradient on up to torch 2.13, and stops it from
// 2.14 on (pytorch#191142).
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 14
constexpr bool kBoundsPass = true;
#else
constexpr bool kBoundsPass = false;
#endif

// clamp_backward: elements between min and max pass, compared in the element's type. A NaN does not
// pass, so it can represent all elements that do not. Tensor bounds are not handled here.
bool clamp(const Call& call, c10::ScalarType type, PredicateFormat* format) {
  if (!is_real(type)) return false;
  const c10::IValue& min = call["min"];
  const c10::IValue& max = call["max"];
  double low = -kInf, high = kInf;
  if (!min.isNone() && !read_number(min, &low)) return false;
  if (!max.isNone() && !read_number(max, &high)) return false;
  low = to_type(type, low);
  high = to_type(type, high);
  if (min.isNone() && max.isNone()) return false;  // then nothing is compared, not even a NaN
  if (max.isNone()) {
    const auto above = kBoundsPass ? Comparison::kGreaterEqual : Comparison::kGreater;
    fill(format, above, low, 0.0, false, kInf, kNan);
  } else if (min.isNone()) {
    const auto below = kBoundsPass ? Comparison::kLessEqual : Comparison::kLess;
    fill(format, below, high, 0.0, false, -kInf, kNan);
  } else if (kBoundsPass) {
    fill(format, Comparison::kInsideClosed, low, high, false, low, kNan);
  } else {
    double inside;
    if (!find_inside(type, low, high, &inside)) return false;
    fill(format, Comparison::kInsideOpen, low, high, false, inside, kNan);
  }
  return true;
}

// grad * isfinite(x).
bool finite(const Call&, c10::ScalarType type, PredicateFormat* format) {
  fill(format, Comparison::kInsideOpen, -kInf, kInf, false, 0.0, kInf);
  return is_real(type);
}

// grad * !isnan(x).
bool not_nan(const Call&, c10::ScalarType type, PredicateFormat* format) {
  fill(format, Comparison::kGreaterEqual, -kInf, 0.0, false, 0.0, kNan);
  return is_real(type);
}

using Predicate = bool (*)(const Call&, c10::ScalarType, PredicateFormat*);

constexpr Rule tests(std::string_view op, std::string_view slot, Predicate predicate,
                     std::string_view nodes, std::string_view reason) {
  return {.op = op,
          .slot = slot,
          .reads = Reads::kPredicate,
          .reason = reason,
          .nodes = nodes,
          .predicate = predicate};
}

constexpr Rule tests_sign_of_nonnegative(Rule rule) {
  rule.sign_of_nonnegative = true;
  return rule;
}

constexpr std::string_view kSign = "backward reads only its sign";
constexpr std::string_view kRange = "backward reads only whether it is in range";
constexpr std::string_view kFinite = "backward reads only whether it is finite";
constexpr std::string_view kNotNan = "backward reads only whether it is NaN";

constexpr std::string_view kClampNodes = "ClampBackward0 ClampBackward1";
constexpr std::string_view kClampMinNodes = "ClampMinBackward0 ClampMinBackward1";
constexpr std::string_view kClampMaxNodes = "ClampMaxBackward0 ClampMaxBackward1";

// An in-place operator saves either its result, which is its argument self, or a copy of what self
// was, which is not an argument and so counts as a result.
constexpr Rule kPredicateRows[] = {
    tests_sign_of_nonnegative(tests("aten::relu", "result", relu, "ReluBackward0", kSign)),
    tests_sign_of_nonnegative(tests("aten::relu_", "self", relu, "ReluBackward0", kSign)),
    tests("aten::leaky_relu", "self", positive, "LeakyReluBackward0", kSign),
    tests("aten::leaky_relu_", "self", positive, "LeakyReluBackward1", kSign),
    tests("aten::leaky_relu_backward", "self", positive, "LeakyReluBackwardBackward0", kSign),
    // In training, rrelu's backward multiplies by the noise and does not read self.
    tests("aten::rrelu_with_noise", "self", positive, "RreluWithNoiseBackward0", kSign),
    tests("aten::rrelu_with_noise_", "self", positive, "RreluWithNoiseBackward1", kSign),
    tests("aten::rrelu_with_noise_functional", "self", positive,
          "RreluWithNoiseFunctionalBackward0", kSign),
    tests("aten::rrelu_with_noise_backward", "self", positive, "RreluWithNoiseBackwardBackward0",
          kSign),
    tests("aten::threshold", "self", threshold, "ThresholdBackward0", kRange),
    tests("aten::threshold_", "result", threshold, "ThresholdBackward1", kRange),
    tests("aten::threshold_backward", "self", threshold, "ThresholdBackwardBackward0", kRange),
    tests("aten::hardtanh", "self", hardtanh, "HardtanhBackward0", kRange),
    tests("aten::hardtanh_", "result", hardtanh, "HardtanhBackward0", kRange),
    tests("aten::hardtanh_backward", "self", hardtanh, "HardtanhBackwardBackward0", kRange),
    tests("aten::hardsigmoid", "self", hardsigmoid, "HardsigmoidBackward0", kRange),
    tests("aten::hardsigmoid_", "result", hardsigmoid, "HardsigmoidBackward0", kRange),
    tests("aten::hardshrink", "self", shrink, "HardshrinkBackward0", kRange),
    tests("aten::hardshrink_backward", "self", shrink, "HardshrinkBackwardBackward0", kRange),
    tests("aten::softshrink", "self", shrink, "SoftshrinkBackward0", kRange),
    tests("aten::softshrink_backward", "self", shrink, "SoftshrinkBackwardBackward0", kRange),
    tests("aten::clamp", "self", clamp, kClampNodes, kRange),
    tests("aten::clamp_", "result", clamp, kClampNodes, kRange),
    tests("aten::clamp_min", "self", clamp, kClampMinNodes, kRange),
    tests("aten::clamp_min_", "result", clamp, kClampMinNodes, kRange),
    tests("aten::clamp_max", "self", clamp, kClampMaxNodes, kRange),
    tests("aten::clamp_max_", "result", clamp, kClampMaxNodes, kRange),
    tests("aten::nan_to_num", "self", finite, "NanToNumBackward0", kFinite),
    tests("aten::nan_to_num_", "result", finite, "NanToNumBackward0", kFinite),
    tests("aten::nansum", "self", not_nan, "NansumBackward0", kNotNan),
};

}  // namespace

c10::ArrayRef<Rule> predicate_rules() { return kPredicateRows; }

}  // namespace backfold::torch_layer
