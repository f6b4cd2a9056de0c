// SPDX-License-Identifier: Apache-2.0
//
// Which kernels serve tensors in host memory. All give the same bytes, so a choice other than the
// usual one is for comparing them.

#ifndef BACKFOLD_TORCH_CODEC_HOST_TARGET_H_
#define BACKFOLD_TORCH_CODEC_HOST_TARGET_H_

#include <string>
#include <string_view>

#include "backfold/execution.h"

namespace backfold::torch_layer {

// From now on, calls of this thread on host memory run on this target: "reference" or one of
// simd_targets(); empty for the usual choice. Raises ValueError for another name.
void use_host_target(const std::string& name);

// What the last call on host memory ran on, since use_host_target() was given a name on this
// thread; empty if there was none.
std::string_view host_target_that_ran();

// The usual choice. Raises RuntimeError if BACKFOLD_TARGET names a target that is not there.
std::string_view usual_host_target();

// Makes an execution on host memory follow this thread's choice.
void follow_host_target(Execution& execution);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_CODEC_HOST_TARGET_H_
