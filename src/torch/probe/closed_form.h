// SPDX-License-Identifier: Apache-2.0
//
// Products of a saved input with a weight that is a leaf (linear layers, convolutions). An error in
// the input reaches only the weight's gradient, where rows (or pixels) add up independently, so its
// energy follows from row norms, without computing the product.

#ifndef BACKFOLD_TORCH_PROBE_CLOSED_FORM_H_
#define BACKFOLD_TORCH_PROBE_CLOSED_FORM_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <vector>

#include "torch/capture/calls.h"
#include "torch/capture/site.h"

namespace backfold::torch_layer {

// Whether there is a closed form for what `site` saves of this call.
bool has_closed_form(const RunningCall& call, const Site& site);

// The leaf that is the weight of a call with a closed form.
at::Tensor weight_of_closed_form(const Operator& op, c10::ArrayRef<c10::IValue> arguments);

// The energies of an error by row, or for a convolution by sample, group of channels and pixel.
// `arguments` are those of the convolution.
at::Tensor energies_by_row(const Operator& op, c10::ArrayRef<c10::IValue> arguments,
                           const at::Tensor& error);

// The energy that each of several errors adds to the weight's gradient. `errors` stacks the
// energies_by_row() of each along a new first dimension.
at::Tensor closed_form(const Operator& op, c10::ArrayRef<c10::IValue> arguments,
                       const at::Tensor& gradient, const at::Tensor& errors);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PROBE_CLOSED_FORM_H_
