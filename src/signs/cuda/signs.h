// SPDX-License-Identifier: Apache-2.0
//
// CUDA kernel of random signs. Arguments have been checked; pointers are to device memory.

#ifndef BACKFOLD_SIGNS_CUDA_SIGNS_H_
#define BACKFOLD_SIGNS_CUDA_SIGNS_H_

#include <cstddef>
#include <cstdint>

#include "backfold/status.h"
#include "base/rng.h"

namespace backfold::cuda {

// Writes `count` elements of 2, 4 or 8 bytes: `number`, the bits of one, with the signs of `key`.
Status fill_signs(std::uint64_t number, std::size_t element_bytes, std::int64_t count,
                  core::MixedKey key, void* destination, void* stream);

}  // namespace backfold::cuda

#endif  // BACKFOLD_SIGNS_CUDA_SIGNS_H_
