// SPDX-License-Identifier: Apache-2.0
//
// The same as exact_ops_values.cpp, for operators with an in-place form, by its name. Each row
// stands for both forms. The tensor that is self in one form may be the result in the other, so
// these rows name no slot, or that of another argument.

#include <string_view>
#include <vector>

#include "torch/reads/exact_ops_rows.h"

namespace backfold::torch_layer {
namespace {

constexpr std::string_view kPowers = "backward takes a power of it";
constexpr std::string_view kPeriodic = "backward takes it modulo a period";
constexpr std::string_view kQuotient = "backward divides by 1 plus its square";

// The gradient of x^n for n = 0, 1, 2, 3 is a polynomial of degree 2 at most: noise stays noise.
bool is_high_power(const Call& call, const at::Tensor&) {
  for (const double low : {0.0, 1.0, 2.0, 3.0}) {
    if (equals(call["exponent"], low)) return false;
  }
  return true;
}

constexpr Rule kInPlaceRows[] = {
    // Divisors.
    exactly("aten::div_", "other", kDivides),
    exactly("aten::addcdiv_", "tensor2", kDivides),
    exactly("aten::sqrt_", "*", kDivides),
    exactly("aten::rsqrt_", "*", kPowers),
    exactly("aten::reciprocal_", "*", kPowers),
    exactly("aten::log_", "*", kDivides),
    exactly("aten::log2_", "*", kDivides),
    exactly("aten::log10_", "*", kDivides),
    exactly("aten::log1p_", "*", kDivides),
    exactly("aten::logit_", "*", kCancels),
    exactly("aten::asin_", "*", kCancels),
    exactly("aten::acos_", "*", kCancels),
    exactly("aten::acosh_", "*", kCancels),
    exactly("aten::atanh_", "*", kCancels),
    exactly("aten::erfinv_", "*", kPoles),
    exactly("aten::atan2_", "*", kDivides),
    exactly("aten::hypot_", "*", kDivides),
    exactly("aten::xlogy_", "*", kDivides),
    exactly("aten::copysign_", "*", kDivides),
    exactly("aten::fmod_", "*", kDivides),
    exactly("aten::remainder_", "*", kDivides),
    exactly("aten::cumprod_", "*", kProducts),
    exactly("aten::renorm_", "*", kCompares),

    // Signs and comparisons.
    exactly("aten::abs_", "*", kSignOf),
    exactly("aten::nextafter_", "*", kCompares),
    exactly("aten::clamp_", "min", kCompares),
    exactly("aten::clamp_", "max", kCompares),
    exactly("aten::clamp_min_", "min", kCompares),
    exactly("aten::clamp_max_", "max", kCompares),
    exactly("aten::scatter_reduce_", "*", kCompares),
    exactly("aten::index_reduce_", "*", kCompares),

    // Powers, periods and poles.
    exactly("aten::pow_", "*", kPowers, is_high_power),
    exactly("aten::ldexp_", "other", kExponentiates),
    exactly("aten::sin_", "*", kPeriodic),
    exactly("aten::cos_", "*", kPeriodic),
    exactly("aten::tan_", "*", kPoles),
    exactly("aten::sinc_", "*", kDivides),
    exactly("aten::lgamma_", "*", kPoles),
    exactly("aten::digamma_", "*", kPoles),
    exactly("aten::polygamma_", "*", kPoles),
    exactly("aten::mvlgamma_", "*", kPoles),
    exactly("aten::igamma_", "*", kExponentiates),
    exactly("aten::igammac_", "*", kExponentiates),
    exactly("aten::i0_", "*", kExponentiates),
    finely("aten::erf_", "*", 8, kExponentiates),
    finely("aten::erfc_", "*", 8, kExponentiates),
    finely("aten::atan_", "*", 8, kQuotient),
    finely("aten::asinh_", "*", 8, kQuotient),
    finely("aten::sinh_", "*", 8, kExponentiates),
    finely("aten::cosh_", "*", 8, kExponentiates),

    // Lists.
    exactly("aten::_foreach_abs_", "*", kSignOf),
    exactly("aten::_foreach_acos_", "*", kCancels),
    exactly("aten::_foreach_addcdiv_", "tensor2", kDivides),
    exactly("aten::_foreach_asin_", "*", kCancels),
    exactly("aten::_foreach_clamp_max_", "*", kCompares),
    exactly("aten::_foreach_clamp_min_", "*", kCompares),
    exactly("aten::_foreach_cos_", "*", kPeriodic),
    exactly("aten::_foreach_div_", "other", kDivides),
    exactly("aten::_foreach_lgamma_", "*", kPoles),
    exactly("aten::_foreach_log_", "*", kDivides),
    exactly("aten::_foreach_log10_", "*", kDivides),
    exactly("aten::_foreach_log1p_", "*", kDivides),
    exactly("aten::_foreach_log2_", "*", kDivides),
    exactly("aten::_foreach_maximum_", "*", kCompares),
    exactly("aten::_foreach_minimum_", "*", kCompares),
    exactly("aten::_foreach_pow_", "*", kPowers),
    exactly("aten::_foreach_reciprocal_", "*", kPowers),
    exactly("aten::_foreach_rsqrt_", "*", kPowers),
    exactly("aten::_foreach_sin_", "*", kPeriodic),
    exactly("aten::_foreach_sqrt_", "*", kDivides),
    exactly("aten::_foreach_tan_", "*", kPoles),
    finely("aten::_foreach_atan_", "*", 8, kQuotient),
    finely("aten::_foreach_erf_", "*", 8, kExponentiates),
    finely("aten::_foreach_erfc_", "*", 8, kExponentiates),
    finely("aten::_foreach_sinh_", "*", 8, kExponentiates),
    finely("aten::_foreach_cosh_", "*", 8, kExponentiates),
};

}  // namespace

std::vector<Rule> in_place_rules() {
  std::vector<Rule> rows;
  for (Rule row : kInPlaceRows) {
    rows.push_back(row);
    row.op.remove_suffix(1);
    rows.push_back(row);
  }
  return rows;
}

}  // namespace backfold::torch_layer
