// SPDX-License-Identifier: Apache-2.0
//
// How bands of a pooled tensor lie over the lanes of a warp.
//
// A warp holds some neighbouring bands in shared memory, with as many lanes each. A lane takes a
// block, or a part of one: neighbouring strips of it along the height; or several in turn.

#ifndef BACKFOLD_POOL_CUDA_PART_CUH_
#define BACKFOLD_POOL_CUDA_PART_CUH_

#include "pool/cuda/task.cuh"

namespace backfold::cuda {

// Where a lane stands.
template <Staging kStaging>
struct LanePlace {
  BandPlace band;
  std::int64_t end;     // elements before the next band
  std::int64_t origin;  // and before the warp's first band
  int own_band;         // of the warp's bands
  int own_lane;         // of the band's lanes
  bool there;           // whether there is such a band

  __device__ LanePlace(const PoolTask& task, int first_band) {
    const int lane = threadIdx.x % 32;
    own_band = lane >> task.lanes_log, own_lane = lane & (task.lanes - 1);
    there = first_band + own_band < task.bands;
    band = place_band<kStaging>(task, min(first_band + own_band, task.bands));
    end = there ? place_band<kStaging>(task, band.index + 1).before : band.before;
    origin = __shfl_sync(kFullWarp, band.before, 0);
  }
};

// The words of codes of a warp's bands, which lie together, in memory and in shared memory.
struct WordPlace {
  std::uint32_t* memory;
  std::uint32_t* shared;
  int count;
  int own;  // the first word of the lane's band

  template <Staging kStaging>
  __device__ WordPlace(const PoolTask& task, const LanePlace<kStaging>& lane, char* room) {
    const std::int64_t first = core::first_word(lane.band.before, task.bits, lane.band.index);
    const int next = lane.there ? lane.band.index + 1 : lane.band.index;
    const std::int64_t origin = __shfl_sync(kFullWarp, first, 0);
    count = __shfl_sync(kFullWarp,
                        static_cast<int>(core::first_word(lane.end, task.bits, next) - origin), 31);
    own = static_cast<int>(first - origin);
    memory = task.codes + origin;
    shared = reinterpret_cast<std::uint32_t*>(room + task.word_offset +
                                              (reinterpret_cast<std::uintptr_t>(memory) & 15u));
  }
};

// A part of a block. One that is not there has no strips, and no elements in its block.
struct Part {
  std::int64_t first;  // element in memory
  int staged;          // the same in shared memory
  int strips;
  int slots;     // strips that it has in the middle of the tensor
  int width;     // elements of a strip
  int position;  // of its first element in the band
  int strip;     // number of its first strip in the band
  int place;     // of its block in the band
  int row, column;
  int in_block;  // elements of its block

  // Of its block's average, among all.
  __device__ std::int64_t average(const PoolTask& task) const {
    return static_cast<std::int64_t>(row) * task.columns + column;
  }
};

template <Staging kStaging>
__device__ inline Part place_part(const PoolTask& task, const LanePlace<kStaging>& lane, int item) {
  Part part{};
  const BandPlace& band = lane.band;
  const int place = task.parts == 1 ? item : task.by_parts.quotient(item);
  const int g = is_channels(kStaging) ? 0 : task.by_run.quotient(place);
  const int k = place - g * task.run;
  part.row = band.first_row + g, part.column = band.first_column + k;
  if (item >= task.items || !lane.there || part.row >= task.block_rows ||
      part.column >= task.columns)
    return part;
  const RowPlace row = place_row<kStaging>(task, part.row);
  const ColumnPlace column = place_column<kStaging>(task, part.column);
  int d = 0, h = 0;
  if (task.parts != 1) {
    const int own = item - place * task.parts;
    d = task.by_tall_parts.quotient(own), h = (own - d * task.tall_parts) * task.part_rows;
  }
  const int line = g * task.rows + d * task.tall + h;
  part.place = place;
  part.in_block = row.depth * row.height * column.width;
  part.slots = min(task.part_rows, task.tall - h);
  part.strip = line * task.run + k;
  part.first =
      static_cast<std::int64_t>(row.first + d * task.height + h) * task.line + column.first;
  part.staged = is_flat(kStaging) ? static_cast<int>(part.first - lane.origin)
                                  : lane.own_band * task.band_room + line * task.staged_row + k;
  part.strips = d < row.depth ? min(part.slots, max(row.height - h, 0)) : 0;
  part.width = column.width;
  part.position = (row.before - band.rows_before + d * row.height + h) * band.run_length +
                  column.before - band.run_begin;
  return part;
}

// Calls visit(part, item) for a lane's parts; `own` is the first of them.
template <Staging kStaging, typename Visit>
__device__ inline void for_parts(const PoolTask& task, const LanePlace<kStaging>& lane,
                                 const Part& own, const Visit& visit) {
  Part part = own;
  for (int item = lane.own_lane;;) {
    if (item < task.items) visit(part, item);
    item += task.lanes;
    if (item >= task.items) break;
    part = place_part<kStaging>(task, lane, item);
  }
}

}  // namespace backfold::cuda

#endif  // BACKFOLD_POOL_CUDA_PART_CUH_
