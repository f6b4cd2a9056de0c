// SPDX-License-Identifier: Apache-2.0
//
// CUDA kernels of narrowed integers. Arguments have been checked; pointers are to device memory.

#ifndef BACKFOLD_LOSSLESS_CUDA_NARROW_H_
#define BACKFOLD_LOSSLESS_CUDA_NARROW_H_

#include <cstddef>
#include <cstdint>

#include "backfold/status.h"
#include "lossless/narrow_code.h"

namespace backfold::cuda {

// Writes the codes of `count` elements and zero bytes up to a multiple of 16.
Status encode(const core::NarrowCode& code, std::size_t element_bytes, const void* source,
              std::int64_t count, void* codes, void* stream);

Status decode(const core::NarrowCode& code, std::size_t element_bytes, const void* codes,
              std::int64_t count, void* destination, void* stream);

// The first element outside the bound and its value; index -1 where there is none. Allocates, and
// waits for the stream: debug builds only.
Status find_broken_bound(const core::NarrowCode& code, std::size_t element_bytes,
                         const void* source, std::int64_t count, void* stream, std::int64_t* index,
                         std::int64_t* value);

}  // namespace backfold::cuda

#endif  // BACKFOLD_LOSSLESS_CUDA_NARROW_H_
