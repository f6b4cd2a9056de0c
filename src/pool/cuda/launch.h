// SPDX-License-Identifier: Apache-2.0
//
// Which of the kernels of pooling a task is for.

#ifndef BACKFOLD_POOL_CUDA_LAUNCH_H_
#define BACKFOLD_POOL_CUDA_LAUNCH_H_

#include <cuda_runtime_api.h>

#include "backfold/status.h"
#include "base/convert.h"
#include "base/cuda/launch.h"
#include "pool/cuda/task.cuh"

namespace backfold::cuda {

struct PoolGrid {
  unsigned blocks, threads;
  std::size_t shared_bytes;
};

// Warps of a thread block: what shared memory of 48 KiB, which needs no permission, has room for.
inline unsigned pool_warps(const PoolTask& task) {
  return 4 * task.warp_bytes <= 48 * 1024 ? 4 : 2 * task.warp_bytes <= 48 * 1024 ? 2 : 1;
}

// Calls launch<T, room of a strip, Staging, whether there is a residual>(grid).
template <typename Launch>
Status launch_pool(const PoolTask& task, Staging staging, const Launch& launch) {
  const unsigned warps = pool_warps(task);
  PoolGrid grid{0, 32 * warps, warps * static_cast<std::size_t>(task.warp_bytes)};
  const std::int64_t per_block = warps * (32u >> task.lanes_log);
  if (const Status fits = blocks_for(task.bands, per_block, &grid.blocks); !fits.ok()) return fits;
  core::with_element(task.type, [&]<typename T>() {
    const auto by_residual = [&]<int kRoom, Staging kStaging>() {
      if (task.bits != 0) return launch.template operator()<T, kRoom, kStaging, true>(grid);
      return launch.template operator()<T, kRoom, kStaging, false>(grid);
    };
    const auto by_staging = [&]<int kRoom>() {
      // The faster ways are for the types and blocks that are used: kernels take time to compile.
      if constexpr (sizeof(T) != 8 && kRoom != 16) {
        if (staging == Staging::kVectors)
          return by_residual.template operator()<kRoom, Staging::kVectors>();
        if (staging == Staging::kSquares)
          return by_residual.template operator()<kRoom, Staging::kSquares>();
        if (staging == Staging::kChannels)
          return by_residual.template operator()<kRoom, Staging::kChannels>();
      }
      if (staging == Staging::kFlat)
        return by_residual.template operator()<kRoom, Staging::kFlat>();
      return by_residual.template operator()<kRoom, Staging::kElements>();
    };
    if (task.room == 4) by_staging.template operator()<4>();
    if (task.room == 8) by_staging.template operator()<8>();
    if (task.room == 16) by_staging.template operator()<16>();
  });
  return check_launch("pool kernel");
}

Status launch_pool_pack(const PoolTask& task, Staging staging, cudaStream_t stream);
Status launch_pool_unpack(const PoolTask& task, Staging staging, cudaStream_t stream);

}  // namespace backfold::cuda

#endif  // BACKFOLD_POOL_CUDA_LAUNCH_H_
