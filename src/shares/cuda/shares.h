// SPDX-License-Identifier: Apache-2.0
//
// CUDA kernel of shares. Arguments have been checked; pointers are to device memory.

#ifndef BACKFOLD_SHARES_CUDA_SHARES_H_
#define BACKFOLD_SHARES_CUDA_SHARES_H_

#include <cstdint>

#include "backfold/status.h"
#include "backfold/types.h"

namespace backfold::cuda {

Status restore_sums(ElementType type, std::int64_t rows, std::int64_t length, void* logarithms,
                    void* stream);

}  // namespace backfold::cuda

#endif  // BACKFOLD_SHARES_CUDA_SHARES_H_
