// SPDX-License-Identifier: Apache-2.0
//
// How the elements of pooled tensors get to shared memory and back.

#ifndef BACKFOLD_POOL_CUDA_STAGE_CUH_
#define BACKFOLD_POOL_CUDA_STAGE_CUH_

#include <cuda_pipeline.h>

#include <cstdint>

#include "base/cuda/elements.cuh"
#include "pool/cuda/part.cuh"

namespace backfold::cuda {

// Calls whole(i) for 16 aligned bytes of `memory`, single(i) for an item before and after them; a
// warp has all of the `count` items.
template <typename T, typename Whole, typename Single>
__device__ inline void for_vectors(const T* memory, int count, const Whole& whole,
                                   const Single& single) {
  constexpr int kPiece = 16 / static_cast<int>(sizeof(T));
  const int lane = threadIdx.x % 32;
  const int odd = static_cast<int>(-reinterpret_cast<std::uintptr_t>(memory) & 15u);
  const int head = min(count, odd / static_cast<int>(sizeof(T)));
  const int body = head + (count - head) / kPiece * kPiece;
#pragma unroll 4
  for (int at = head + kPiece * lane; at < body; at += kPiece * 32) whole(at);
  if (lane < head) single(lane);
  if (body + lane < count) single(body + lane);
}

// A warp's elements in shared memory.
template <typename T, Staging kStaging>
class Stage {
 public:
  __device__ Stage(const PoolTask& task, const LanePlace<kStaging>& lane, char* room)
      : task_(task), lane_(lane), memory_(static_cast<T*>(task.elements)) {
    if constexpr (is_flat(kStaging)) {
      memory_ += lane.origin;
      room += reinterpret_cast<std::uintptr_t>(memory_) & 15u;  // for copies of 16 bytes
      count_ = static_cast<int>(__shfl_sync(kFullWarp, lane.end, 31) - lane.origin);
    }
    shared_ = reinterpret_cast<T*>(room);
  }
  __device__ T* shared() const { return shared_; }

  // Copies elements in. They are there after arrive().
  template <int kRoom>
  __device__ void start(const Part& own) const {
    for_pieces<kRoom>(
        own, [](const T* memory, T* shared) { __pipeline_memcpy_async(shared, memory, 16); },
        [](const T* memory, T* shared) {
          if constexpr (sizeof(T) >= 4) {
            __pipeline_memcpy_async(shared, memory, sizeof(T));
          } else {
            *shared = *memory;
          }
        });
    __pipeline_commit();
  }
  __device__ static void arrive() {
    __pipeline_wait_prior(0);
    __syncwarp();
  }

  // Copies them back.
  template <int kRoom>
  __device__ void finish(const Part& own) const {
    __syncwarp();
    for_pieces<kRoom>(
        own,
        [](T* memory, const T* shared) {
          __stcs(reinterpret_cast<uint4*>(memory), *reinterpret_cast<const uint4*>(shared));
        },
        [](T* memory, const T* shared) { *memory = *shared; });
  }

 private:
  // Calls whole(memory, shared) for 16 aligned bytes, single(memory, shared) for an element.
  template <int kRoom, typename Whole, typename Single>
  __device__ void for_pieces(const Part& own, const Whole& whole, const Single& single) const {
    constexpr int kPiece = kVector<T>;
    if constexpr (is_flat(kStaging)) {
      for_vectors(
          memory_, count_, [&](int at) { whole(memory_ + at, shared_ + at); },
          [&](int at) { single(memory_ + at, shared_ + at); });
    } else if constexpr (is_channels(kStaging)) {
      const int chunk = lane_.own_lane & ((1 << task_.chunks_log) - 1);
      const int first = lane_.band.first_column + chunk * kPiece;
      if (!lane_.there || first >= task_.columns) return;
      const RowPlace row = place_row<kStaging>(task_, lane_.band.first_row);
      const ColumnPlace column = place_column<kStaging>(task_, first);
      // Lanes share out the positions of all strips, `step` apart: rows of them, or parts of a row.
      const int step = task_.lanes >> task_.chunks_log, begin = lane_.own_lane >> task_.chunks_log;
      const int columns = min(step, kRoom), rows = max(step / kRoom, 1);
      const int j_begin = begin % kRoom;
      const std::int64_t column_step = std::int64_t{columns} * task_.inner;
      const std::int64_t row_step =
          std::int64_t{rows} * task_.line - std::int64_t{kRoom - columns} * task_.inner;
      T* memory = memory_ + static_cast<std::int64_t>(row.first + begin / kRoom) * task_.line +
                  column.first + j_begin * task_.inner;
      T* shared = shared_ + lane_.own_band * task_.band_room + chunk * kPiece + begin * task_.run;
      int j = j_begin;
#pragma unroll 4
      for (int cell = begin; cell < row.height * kRoom; cell += step) {
        if (j < column.width) whole(memory, shared);
        shared += step * task_.run;
        j += columns;
        const bool next_row = j >= kRoom;
        memory += next_row ? row_step : column_step;
        j = next_row ? j_begin : j;
      }
    } else {
      for_parts<kStaging>(task_, lane_, own, [&](const Part& part, int) {
        T* memory = memory_ + part.first;
        T* shared = shared_ + part.staged;
        for (int r = 0; r < part.strips; ++r, memory += task_.line, shared += task_.staged_row)
#pragma unroll
          for (int j = 0; j < kRoom; ++j)
            if (j < part.width)
              single(memory + static_cast<std::int64_t>(j) * task_.inner, shared + j * task_.run);
      });
    }
  }

  const PoolTask& task_;
  const LanePlace<kStaging>& lane_;
  T* memory_;
  T* shared_;
  int count_ = 0;  // elements, if they are flat
};

}  // namespace backfold::cuda

#endif  // BACKFOLD_POOL_CUDA_STAGE_CUH_
