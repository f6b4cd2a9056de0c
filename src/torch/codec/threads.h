// SPDX-License-Identifier: Apache-2.0

#ifndef BACKFOLD_TORCH_CODEC_THREADS_H_
#define BACKFOLD_TORCH_CODEC_THREADS_H_

namespace backfold::torch_layer {

// An Executor that runs parts on the threads of torch's own pool. Threads of ours would run beside
// those, which go on spinning for a while after each of torch's operators.
void on_threads_of_torch(int parts, void (*work)(void* context, int part), void* context);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_CODEC_THREADS_H_
