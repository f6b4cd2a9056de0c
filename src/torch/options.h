// SPDX-License-Identifier: Apache-2.0
//
// Checks the user's options, and makes the state that a controller begins with.

#ifndef BACKFOLD_TORCH_OPTIONS_H_
#define BACKFOLD_TORCH_OPTIONS_H_

#include <memory>
#include <optional>

#include "backfold/controller.h"
#include "torch/plan/plan.h"

namespace backfold::torch_layer {

// The one target that the options name.
struct Wanted {
  std::optional<Target> target;  // none: only what stays exact
  bool adaptive = false;         // whether widths are planned; if not, the target is in bits
};

// Each raises ValueError, naming the option, its value and what is allowed.
Wanted wanted_by(const ControllerOptions& options);
std::shared_ptr<State> state_for(const ControllerOptions& options);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_OPTIONS_H_
