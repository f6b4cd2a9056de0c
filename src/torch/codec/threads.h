// SPDX-License-Identifier: Apache-2.0

#ifndef BACKFOLD_TORCH_CODEC_THREADS_H_
#define BACKFOLD_TORCH_CODEC_THREADS_H_

#include "backfold/execution.h"

namespace backfold::torch_layer {

// Runs parts on the threads of torch's own pool: threads of ours would run beside those, which go
// on spinning for a while after each of torch's operators. Null where a build cannot reach them.
Executor executor_of_torch();

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_CODEC_THREADS_H_
