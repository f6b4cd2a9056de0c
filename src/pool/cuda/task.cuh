// SPDX-License-Identifier: Apache-2.0
//
// What the kernels of pooling are told, and where a band of the tensor lies. All numbers but
// offsets of elements fit 31 bits (make_task() checks).

#ifndef BACKFOLD_POOL_CUDA_TASK_CUH_
#define BACKFOLD_POOL_CUDA_TASK_CUH_

#include <cstdint>

#include "base/cuda/divider.h"
#include "base/cuda/launch.h"
#include "base/cuda/magic.cuh"
#include "base/rng.h"
#include "pool/arithmetic.h"
#include "pool/geometry.h"

namespace backfold::cuda {

// How the elements of a warp's bands get to shared memory and back.
enum class Staging {
  kVectors,   // as they lie together in memory, in whole strips that can be read in vectors
  kFlat,      // the same, in strips of any length and place
  kSquares,   // channels of whole square blocks that lie together, 16 bytes at a time
  kChannels,  // the same of any blocks
  kElements   // one by one
};

__device__ constexpr bool is_flat(Staging staging) {
  return staging == Staging::kVectors || staging == Staging::kFlat;
}
__device__ constexpr bool is_channels(Staging staging) {
  return staging == Staging::kSquares || staging == Staging::kChannels;
}

// Elements of a strip that share a hash (rng.h).
BACKFOLD_HD constexpr int piece_of(int room) { return room < 8 ? room : 8; }

// The run of channels of kSquares.
BACKFOLD_HD constexpr int square_run(int room) { return core::strips_for(room) / room; }

struct PoolTask {
  int block, bits, room, tall, rows, group, run, slots;
  int depth, height, width, inner, line;  // line: elements of one row of the tensor
  int high, deep, cuts, columns;
  int block_rows, tensor_rows, bands;
  Divider by_run, by_inner, by_high, by_deep, by_cuts, by_parts, by_tall_parts;
  int draws;  // blocks of random numbers of a strip

  // A band's work is cut into items for its lanes: blocks, or parts of them along the height.
  int lanes;       // of a band, a power of two
  int lanes_log;   // its logarithm
  int items;       // of a band
  int parts;       // of a block
  int tall_parts;  // of them along the height
  int part_rows;   // strips of a part

  // Shared memory of a warp, in bytes: sums of strips and averages (of blocks that have parts),
  // parts and their bases, words of codes, elements.
  int average_offset, part_offset, base_offset, word_offset, stage_offset, warp_bytes;
  int staged_row;  // elements from one strip of a block to the next
  int band_room;   // elements of a band, unless they are flat
  int chunks_log;  // kChannels: 16 bytes of a run of channels, as a logarithm

  bool whole;     // every strip has `room` elements
  bool bytewise;  // and codes of up to eight of them make 1, 2, 4 or 8 bytes
  bool pairs;     // flat elements can be read two at a time
  float factor;   // mean_factor() of a whole block
  ElementType type;
  core::Levels levels;
  core::MixedKey key;
  std::uint32_t places[4];    // 2^(i * bits): where codes stand in a word
  std::uint64_t fifth_place;  // 2^(4 * bits)
  std::uint32_t magic_debt;   // what adding 2^23 to each leaves above four codes
  void* elements;             // the source or the destination
  std::uint16_t* averages;
  std::uint32_t* headers;
  std::uint32_t* codes;
  std::int64_t average_room, header_room, code_room;  // items with their padding
};

// A lane's band.
struct BandPlace {
  int index;
  int first_row, first_column;  // block row, and block in it
  int rows_before;              // rows of the tensor in the block rows before
  int run_begin, run_length;    // elements of one row: before the band, and in it
  std::int64_t before;          // elements before the band
};

struct RowPlace {
  int before;         // rows of the tensor in the block rows before
  int first;          // its first row
  int depth, height;  // rows that it has
};

template <Staging kStaging>
__device__ inline RowPlace place_row(const PoolTask& task, int index) {
  const int above = task.by_high.quotient(index);
  const int height_at = (index - above * task.high) * task.block;
  const int height = min(task.block, task.height - height_at);
  if (kStaging != Staging::kElements || task.depth == 1) {
    const int first = above * task.height + height_at;
    return {first, first, 1, height};
  }
  const int outer = task.by_deep.quotient(above);
  const int depth_at = (above - outer * task.deep) * task.block;
  const int depth = min(task.block, task.depth - depth_at);
  const int plane = (outer * task.depth + depth_at) * task.height;
  return {plane + depth * height_at, plane + height_at, depth, height};
}

struct ColumnPlace {
  int first, before, width;
};

template <Staging kStaging>
__device__ inline ColumnPlace place_column(const PoolTask& task, int index) {
  const int wide = is_flat(kStaging) ? index : task.by_inner.quotient(index);
  const int at = wide * task.block, channel = index - wide * task.inner;
  const int width = min(task.block, task.width - at);
  if (is_flat(kStaging)) return {at, at, width};
  return {at * task.inner + channel, at * task.inner + channel * width, width};
}

template <Staging kStaging>
__device__ inline BandPlace place_band(const PoolTask& task, int index) {
  BandPlace band;
  band.index = index;
  if (is_flat(kStaging) || task.cuts == 1) {
    band.first_row = index * task.group;
    band.first_column = 0;
    band.run_begin = 0;
    band.run_length = task.line;
    const int before = place_row<kStaging>(task, band.first_row).before;
    band.rows_before = band.first_row < task.block_rows ? before : task.tensor_rows;
    band.before = static_cast<std::int64_t>(band.rows_before) * task.line;
    return band;
  }
  band.first_row = task.by_cuts.quotient(index);
  band.first_column = (index - band.first_row * task.cuts) * task.run;
  const RowPlace row = place_row<kStaging>(task, band.first_row);
  const int end = band.first_column + task.run;
  band.rows_before = row.before;
  band.run_begin = place_column<kStaging>(task, band.first_column).before;
  band.run_length =
      (end < task.columns ? place_column<kStaging>(task, end).before : task.line) - band.run_begin;
  band.before = static_cast<std::int64_t>(row.before) * task.line +
                static_cast<std::int64_t>(row.depth * row.height) * band.run_begin;
  if (band.first_row >= task.block_rows)
    band.before = static_cast<std::int64_t>(task.tensor_rows) * task.line;
  return band;
}

}  // namespace backfold::cuda

#endif  // BACKFOLD_POOL_CUDA_TASK_CUH_
