// SPDX-License-Identifier: Apache-2.0
//
// When decoded tensors are written past the caches.

#ifndef BACKFOLD_BASE_CACHES_H_
#define BACKFOLD_BASE_CACHES_H_

#include <atomic>
#include <cstdint>

namespace backfold::core {

// Decoded tensors of at least as many bytes are written past the caches: as large as the last of
// them is. What reads a smaller one next finds it there, in up to a third less time; a larger one
// would be read from memory either way. Tests and benchmarks set it.
std::atomic<std::int64_t>& streamed_bytes();

}  // namespace backfold::core

#endif  // BACKFOLD_BASE_CACHES_H_
