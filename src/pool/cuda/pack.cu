// SPDX-License-Identifier: Apache-2.0

#include "pool/cuda/lane.cuh"
#include "pool/cuda/launch.h"
#include "pool/cuda/stage.cuh"

namespace backfold::cuda {
namespace {

// Zero bytes up to a multiple of 16 after the averages and the headers. The first warp's task.
__device__ inline void zero_padding(const PoolTask& task, int lane) {
  const std::int64_t averages = static_cast<std::int64_t>(task.block_rows) * task.columns + lane;
  if (averages < task.average_room) task.averages[averages] = 0;
  if (task.bits != 0 && task.bands + lane < task.header_room) task.headers[task.bands + lane] = 0;
}

// Joins what the lanes of a band found.
__device__ inline Extent joined(const PoolTask& task, Extent extent) {
  int flags = (extent.huge ? 1 : 0) | (extent.finite ? 0 : 2);
#pragma unroll 1
  for (int distance = 1; distance < task.lanes; distance *= 2) {
    extent.low = fminf(extent.low, __shfl_xor_sync(kFullWarp, extent.low, distance));
    extent.high = fmaxf(extent.high, __shfl_xor_sync(kFullWarp, extent.high, distance));
    flags |= __shfl_xor_sync(kFullWarp, flags, distance);
  }
  return {extent.low, extent.high, (flags & 1) != 0, (flags & 2) == 0};
}

// Mapping    a warp packs some bands in shared memory, a lane at a time a block or part of one
// Launch     blocks of 128 (of 64 or 32 where bands are large), a grid as large as the work
// Alignment  kFlat copies 16 bytes at a time, at any alignment; kChannels needs 16 bytes; kElements
//            goes by element
// Bytes      source once, averages, headers and codes once
template <typename T, int kRoom, Staging kStaging, bool kResidual>
__global__ void __launch_bounds__(128, kResidual ? 6 : 8)
    pack_pool_kernel(const __grid_constant__ PoolTask task) {
  extern __shared__ uint4 shared[];
  const int warp = threadIdx.x / 32;
  char* const room = reinterpret_cast<char*>(shared) + warp * task.warp_bytes;
  const int tile = static_cast<int>(blockIdx.x * (blockDim.x / 32)) + warp;
  if (tile == 0) zero_padding(task, threadIdx.x % 32);
  const int first_band = tile << (5 - task.lanes_log);
  if (first_band >= task.bands) return;
  const LanePlace<kStaging> place(task, first_band);
  const Stage<T, kStaging> stage(task, place, room + task.stage_offset);
  const PoolLane<T, kRoom, kStaging> lane(task, place, stage.shared(), room);
  stage.template start<kRoom>(lane.own());
  stage.arrive();

  const Extent found = lane.template average<kResidual>();
  if constexpr (kResidual) {
    const Extent extent = joined(task, found);
    const float beyond = extent.huge ? INFINITY : 0.0f;
    const core::Range range =
        extent.finite ? core::band_range(-beyond, beyond, extent.low, extent.high, task.levels)
                      : core::Range{core::kNanBand, 0.0f, 0.0f};
    if (place.there && place.own_lane == 0) task.headers[place.band.index] = range.header;

    const WordPlace words(task, place, room);
    uint4* const first = reinterpret_cast<uint4*>(room + task.word_offset);
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < (task.stage_offset - task.word_offset) / 16; i += 32)
      first[i] = {};
    __syncwarp();
    if (place.there && extent.finite) lane.draw(range, extent.huge, words.shared + words.own);
    __syncwarp();
    for_vectors(
        words.memory, words.count,
        [&](int at) {
          *reinterpret_cast<uint4*>(words.memory + at) =
              *reinterpret_cast<const uint4*>(words.shared + at);
        },
        [&](int at) { words.memory[at] = words.shared[at]; });
    if (place.band.index == task.bands - 1 && place.own_lane == 0)
      for (std::uint32_t* word = words.memory + words.count; word < task.codes + task.code_room;)
        *word++ = 0;
  }
}

}  // namespace

Status launch_pool_pack(const PoolTask& task, Staging staging, cudaStream_t stream) {
  return launch_pool(
      task, staging,
      [&]<typename T, int kRoom, Staging kStaging, bool kResidual>(const PoolGrid& grid) {
        pack_pool_kernel<T, kRoom, kStaging, kResidual>
            <<<grid.blocks, grid.threads, grid.shared_bytes, stream>>>(task);
      });
}

}  // namespace backfold::cuda
