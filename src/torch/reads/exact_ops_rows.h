// SPDX-License-Identifier: Apache-2.0
//
// The parts of the table in exact_ops.h, one file each, and what several of them use to make rows.

#ifndef BACKFOLD_TORCH_READS_EXACT_OPS_ROWS_H_
#define BACKFOLD_TORCH_READS_EXACT_OPS_ROWS_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

#include <string_view>
#include <vector>

#include "torch/reads/exact_ops.h"

namespace backfold::torch_layer {

c10::ArrayRef<Rule> predicate_rules();
c10::ArrayRef<Rule> index_rules();
c10::ArrayRef<Rule> geometry_rules();
c10::ArrayRef<Rule> function_rules();
std::vector<Rule> value_rules();
std::vector<Rule> in_place_rules();

inline constexpr std::string_view kDivides = "backward divides by it";
inline constexpr std::string_view kCompares = "backward compares it";
inline constexpr std::string_view kSignOf = "backward multiplies by its sign";
inline constexpr std::string_view kCancels = "backward divides by a small difference of it";
inline constexpr std::string_view kExponentiates = "backward exponentiates it";
inline constexpr std::string_view kPoles = "backward evaluates a function with poles at it";
inline constexpr std::string_view kProducts = "backward divides a product by it";
inline constexpr std::string_view kLogits = "its products are exponentiated in backward";

constexpr Rule exactly(std::string_view op, std::string_view slot, std::string_view reason,
                       bool (*when)(const Call&, const at::Tensor&) = nullptr) {
  return {.op = op, .slot = slot, .reads = Reads::kExactly, .reason = reason, .when = when};
}

constexpr Rule finely(std::string_view op, std::string_view slot, int bits,
                      std::string_view reason) {
  return {.op = op, .slot = slot, .reads = Reads::kFinely, .reason = reason, .bits = bits};
}

inline bool equals(const c10::IValue& value, double number) {
  return (value.isDouble() && value.toDouble() == number) ||
         (value.isInt() && static_cast<double>(value.toInt()) == number);
}

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_READS_EXACT_OPS_ROWS_H_
