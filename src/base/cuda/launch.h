// SPDX-License-Identifier: Apache-2.0
//
// What the CUDA files share: errors of the runtime as statuses, the size of a grid, and all lanes
// of a warp.

#ifndef BACKFOLD_BASE_CUDA_LAUNCH_H_
#define BACKFOLD_BASE_CUDA_LAUNCH_H_

#include <cuda_runtime_api.h>

#include <cinttypes>
#include <cstdint>
#include <limits>

#include "backfold/status.h"

namespace backfold::cuda {

inline constexpr unsigned kFullWarp = 0xffff'ffffu;

// The status of a runtime call; `call` names it in the message.
inline Status check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return {};
  return Status::error(StatusCode::kDevice, "%s failed: %s, %s", call, cudaGetErrorName(error),
                       cudaGetErrorString(error));
}

// The status of the launch just made.
inline Status check_launch(const char* kernel) { return check(cudaGetLastError(), kernel); }

// Blocks that cover `items`, so many to a block.
inline Status blocks_for(std::int64_t items, std::int64_t items_per_block, unsigned* blocks) {
  const std::int64_t needed = items / items_per_block + (items % items_per_block != 0);
  if (needed > std::numeric_limits<std::int32_t>::max())
    return Status::error(StatusCode::kInvalidArgument,
                         "count must be at most %" PRId64 " on a GPU, got %" PRId64,
                         std::numeric_limits<std::int32_t>::max() * items_per_block, items);
  *blocks = static_cast<unsigned>(needed);
  return {};
}

inline bool is_aligned(const void* data, std::size_t bytes) {
  return reinterpret_cast<std::uintptr_t>(data) % bytes == 0;
}

}  // namespace backfold::cuda

#endif  // BACKFOLD_BASE_CUDA_LAUNCH_H_
