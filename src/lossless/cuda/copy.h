// SPDX-License-Identifier: Apache-2.0
//
// A copy within device memory, on a stream.

#ifndef BACKFOLD_LOSSLESS_CUDA_COPY_H_
#define BACKFOLD_LOSSLESS_CUDA_COPY_H_

#include <cstddef>

#include "backfold/status.h"

namespace backfold::cuda {

Status copy(const void* source, void* destination, std::size_t bytes, void* stream);

}  // namespace backfold::cuda

#endif  // BACKFOLD_LOSSLESS_CUDA_COPY_H_
