// SPDX-License-Identifier: Apache-2.0
//
// Products of a saved input with a weight that is a leaf (linear layers, convolutions). An error of
// the input reaches nothing but the weight's gradient, where rows (or pixels) add up independently:
// its energy follows from row norms, without the product.

#ifndef BACKFOLD_TORCH_PROBE_CLOSED_FORM_H_
#define BACKFOLD_TORCH_PROBE_CLOSED_FORM_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <vector>

#include "torch/capture/calls.h"
#include "torch/capture/site.h"

namespace backfold::torch_layer {

// Whether what `site` saves of this call has one.
bool has_closed_form(const RunningCall& call, const Site& site);

// What an error looks like to the formula: energies by row (rows), or by sample, group of channels
// and pixel. `arguments` are those of a convolution.
at::Tensor energies_by_row(const Operator& op, c10::ArrayRef<c10::IValue> arguments,
                           const at::Tensor& error);

// The energy that each of several errors adds to the weight's gradient. `errors` holds what
// energies_by_row() gave for each of them, along a new first dimension.
at::Tensor closed_form(const Operator& op, c10::ArrayRef<c10::IValue> arguments,
                       const at::Tensor& gradient, const at::Tensor& errors);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PROBE_CLOSED_FORM_H_
