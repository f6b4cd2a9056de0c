// SPDX-License-Identifier: Apache-2.0

#ifndef BACKFOLD_BASE_CUDA_CAPTURE_H_
#define BACKFOLD_BASE_CUDA_CAPTURE_H_

namespace backfold::cuda {

// Whether what is enqueued on a stream goes into a CUDA graph.
bool is_capturing(void* stream);

}  // namespace backfold::cuda

#endif  // BACKFOLD_BASE_CUDA_CAPTURE_H_
