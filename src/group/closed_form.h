// SPDX-License-Identifier: Apache-2.0
//
// A program of numbers and one activation, as a formula.
//
// Steps cost a kernel more than their arithmetic: each is looked up and branched to. What needs
// nothing but x is known before, so the GELU of GPT-2, ten steps written out, comes down to two
// lines and a cubic:
//
//   offset + slope * x + (factor + gain * x) * f(inner(x))

#ifndef BACKFOLD_GROUP_CLOSED_FORM_H_
#define BACKFOLD_GROUP_CLOSED_FORM_H_

#include <optional>
#include <span>

#include "backfold/epilogue.h"
#include "base/host_device.h"
#include "group/row_affine.h"

namespace backfold::core {

struct ClosedForm {
  struct Line {
    float constant = 0.0f, slope = 0.0f;
  };
  Activation activation = Activation::kNone;
  float inner[4] = {0.0f, 1.0f, 0.0f, 0.0f};  // by power of x
  bool is_cubic = false;                      // else inner is a line
  Line factor = {1.0f, 0.0f}, offset;
};

// The formula of these steps; none where they need more than x, have no activation or two, or one
// that must give the same bytes on every backend. It rounds differently, as activations may.
std::optional<ClosedForm> closed_form(std::span<const Step> steps);

// 0 times an infinity is left out, as the steps have no such term.
BACKFOLD_HD float at(const ClosedForm::Line& line, float x) {
  return line.slope != 0.0f ? fused(line.slope, x, line.constant) : line.constant;
}

BACKFOLD_HD float argument(const ClosedForm& form, float x) {
  float slope = form.inner[1];
  if (form.is_cubic) slope = fused(fused(form.inner[3], x, form.inner[2]), x, slope);
  return fused(slope, x, form.inner[0]);
}

// `activated` is f(argument(x)).
BACKFOLD_HD float completed(const ClosedForm& form, float x, float activated) {
  return fused(at(form.factor, x), activated, at(form.offset, x));
}

}  // namespace backfold::core

#endif  // BACKFOLD_GROUP_CLOSED_FORM_H_
