// SPDX-License-Identifier: Apache-2.0
//
// Recipes: operations that give the same result when they run again.
//
// Autograd saves both ends of most cheap operations: GELU's input for GELU, its result for the next
// linear layer. Where one end is kept anyway, the other needs no memory: it is made again when
// backward asks for it. The table in recipes.cpp lists the operators that can be, one row each.
// Most are cheap. Matrix products, convolutions, attention and softmax are not: they run again only
// where a plan says so, for the sake of a budget. Their arguments may be rounded tensors, unless a
// row says otherwise: what they make is then as good as their arguments, for operators that are
// linear exactly so, for the others nearly (the bias of GELU is part of the error that a probe
// measures).

#ifndef BACKFOLD_TORCH_READS_RECIPES_H_
#define BACKFOLD_TORCH_READS_RECIPES_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <c10/util/ArrayRef.h>

#include <optional>
#include <string_view>
#include <vector>

#include "torch/reads/exact_ops.h"

namespace backfold::torch_layer {

struct Recipe {
  std::string_view op;  // without overload; only the first result is ever made again
  // The operator that makes the same, where it is another: out of place, without random numbers.
  std::string_view again = {};
  // Arguments that must not be rounded, separated by spaces; "*" for all of them.
  std::string_view exact = {};
  // Arguments that are left out the second time: state that the first call has updated.
  std::string_view left_out = {};
  // What rounded arguments take instead of another call of the operator.
  enum class OnRounded : std::uint8_t {
    kSame,        // nothing else
    kStatistics,  // a norm: with the statistics of the first call, never with new ones
    kBits,        // ReLU, leaky or not: by the exact signs that its own backward keeps
    kIndices,     // a maximum: what lies where the first call found it
  };
  OnRounded on_rounded = OnRounded::kSame;
  // Results of the first call that it takes as well, by index: statistics, a mask.
  int first_companion = 0, companions = 0;
  // What it is to a kernel that decodes a packet and makes the result in one pass.
  enum class Fused : std::uint8_t {
    kNone,
    kCast,
    kMask,
    kSum,
    kDifference,
    kReverseDifference,
    kProduct,
    kQuotient,  // by a number
    kNegative,
    kPower,
    kGelu,
    kSilu,
    kSigmoid,
    kTanh,
    kNorm,
  };
  Fused fused = Fused::kNone;
  bool product = false;  // takes time: only where a plan says so
  // If given, only calls for which it returns true can be run again.
  bool (*when)(const Call& call) = nullptr;
};

// The row of an operator, or null.
const Recipe* recipe_of(std::string_view op);

// The factor of what a call of dropout keeps.
double dropout_scale(const Call& call, at::ScalarType type);

// What a second run is given: the arguments of the first, tensors among them made again, and the
// companions in the order of the table.
struct RecipeInputs {
  const Recipe& recipe;
  const c10::FunctionSchema& schema;
  std::vector<c10::IValue>& arguments;
  c10::ArrayRef<at::Tensor> companions;
  at::Tensor bits;  // OnRounded::kBits: positive where the result is
};

// The result of an operator that takes rounded arguments in its own way, or of one that takes a
// companion in place of random numbers; undefined where the operator itself is to be called.
at::Tensor made_by_recipe(const RecipeInputs& inputs, bool rounded);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_READS_RECIPES_H_
