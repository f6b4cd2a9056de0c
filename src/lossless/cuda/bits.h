// SPDX-License-Identifier: Apache-2.0
//
// CUDA kernels of predicates and masks. Arguments have been checked; pointers are to device memory.

#ifndef BACKFOLD_LOSSLESS_CUDA_BITS_H_
#define BACKFOLD_LOSSLESS_CUDA_BITS_H_

#include <cstddef>
#include <cstdint>

#include "backfold/status.h"
#include "base/bits.h"

namespace backfold::cuda {

// Writes bit_bytes(count) bytes to `bits`. If `prefix` is given, also writes its 16 bytes: some
// element whose bit is set (zero if there is none), then zeros.
Status pack_bits(const core::BitTest& test, std::size_t element_bytes, const void* source,
                 std::int64_t count, void* bits, void* prefix, void* stream);

// If `prefix` is given, a 1 unpacks to the element at its start instead of to values.if_true.
Status unpack_bits(const core::BitValues& values, std::size_t element_bytes, const void* bits,
                   std::int64_t count, void* destination, const void* prefix, void* stream);

// An element that is -0 or, with +0 and another element, a third value; -1 where a mask is
// two-valued. Allocates, and waits for the stream: debug builds only.
Status find_odd_one(std::size_t element_bytes, const void* source, std::int64_t count, void* stream,
                    std::int64_t* odd_one);

}  // namespace backfold::cuda

#endif  // BACKFOLD_LOSSLESS_CUDA_BITS_H_
