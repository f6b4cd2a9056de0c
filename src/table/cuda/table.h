// SPDX-License-Identifier: Apache-2.0
//
// CUDA kernels of the table codec. Arguments have been checked; pointers are to device memory.

#ifndef BACKFOLD_TABLE_CUDA_TABLE_H_
#define BACKFOLD_TABLE_CUDA_TABLE_H_

#include <cstdint>

#include "backfold/status.h"
#include "backfold/types.h"
#include "table/code.h"

namespace backfold::cuda {

// Writes the whole payload, padding included.
Status pack_table(const core::TableCode& table, ElementType type, const void* source,
                  std::int64_t count, void* payload, void* stream);

Status unpack_table(const core::TableCode& table, ElementType type, const void* payload,
                    std::int64_t count, void* destination, void* stream);

}  // namespace backfold::cuda

#endif  // BACKFOLD_TABLE_CUDA_TABLE_H_
