// SPDX-License-Identifier: Apache-2.0
//
// One step of training that measures itself where its turn has come.

#ifndef BACKFOLD_TORCH_STEP_H_
#define BACKFOLD_TORCH_STEP_H_

#include <functional>

#include "backfold/controller.h"

namespace backfold::torch_layer {

// Runs `forward` on the whole of its batch in a scope, and backward. Where it is measured by
// running again, that is with `part` of the batch.
at::Tensor run_step(Controller& controller, const std::function<at::Tensor(double)>& forward,
                    double part);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_STEP_H_
