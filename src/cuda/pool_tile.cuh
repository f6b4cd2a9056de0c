// SPDX-License-Identifier: Apache-2.0
//
// How bands of a pooled tensor lie over the lanes of a warp, and how their elements get there.
//
// A warp takes two neighbouring bands, with 16 lanes each, or a larger one. All numbers but offsets
// of elements fit 31 bits (make_task() checks).

#ifndef BACKFOLD_CUDA_POOL_TILE_CUH_
#define BACKFOLD_CUDA_POOL_TILE_CUH_

#include <cuda_pipeline.h>

#include <cstdint>

#include "core/pool_arithmetic.h"
#include "core/pool_geometry.h"
#include "core/rng.h"
#include "cuda/elements.cuh"

namespace backfold::cuda {

inline constexpr unsigned kAllLanes = 0xffff'ffffu;

// How strips are dealt to the lanes of a band, and how their elements are reached.
enum class Walk {
  kJoined,    // strips are whole and neighbours in memory: lane l has l, l + lanes, ..., in vectors
  kChannels,  // channels lie together: lane l has as many neighbours as it holds, in vectors
  kStaged,    // a tile lies together: as kJoined, by way of shared memory
  kScattered  // as kJoined, by element
};

// Division of numbers below 2^31 by one that is known beforehand.
struct Divider {
  std::uint32_t multiplier = 0x8000'0000u;
  std::uint32_t shift = 31;

  Divider() = default;
  explicit Divider(std::int64_t divisor) {
    while ((std::int64_t{1} << (shift - 31)) < divisor) ++shift;
    const std::uint64_t power = std::uint64_t{1} << shift, by = static_cast<std::uint64_t>(divisor);
    multiplier = static_cast<std::uint32_t>((power + by - 1) / by);
  }
  __device__ int divide(int number) const {
    // Without the cast to 32 bits it would be a product of 64.
    return static_cast<int>(
        static_cast<std::uint64_t>(static_cast<std::uint32_t>(number)) * multiplier >> shift);
  }
};

struct PoolTask {
  int block, bits, room, tall, rows, group, run, slots, draws;
  int depth, height, width, inner, line;  // line: elements of one row of the tensor
  int high, deep, cuts, columns;
  int block_rows, tensor_rows, bands;
  Divider by_run, by_rows, by_tall, by_inner, by_high, by_deep, by_cuts;
  int lanes;         // of a band: 16 or 32
  int lanes_log;     // its logarithm
  int band_words;    // of shared memory for its codes
  int warp_bytes;    // of shared memory
  int stage_offset;  // in them: where elements are staged
  bool whole;        // every strip has `room` elements
  bool direct;       // and codes of up to eight of them make 1, 2, 4 or 8 bytes
  ElementType type;
  core::Levels levels;
  core::MixedKey key;
  void* elements;  // the source or the destination
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

// Whether bands are whole rows of a tensor without depth.
__device__ constexpr bool is_flat(Walk walk) {
  return walk == Walk::kJoined || walk == Walk::kStaged;
}

struct RowPlace {
  int before;         // rows of the tensor in the block rows before
  int first;          // its first row
  int depth, height;  // rows that it has
};

template <Walk kWalk>
__device__ inline RowPlace place_row(const PoolTask& task, int index) {
  const int above = task.by_high.divide(index);
  const int height_at = (index - above * task.high) * task.block;
  const int height = min(task.block, task.height - height_at);
  if (is_flat(kWalk) || task.depth == 1) {
    const int first = above * task.height + height_at;
    return {first, first, 1, height};
  }
  const int outer = task.by_deep.divide(above);
  const int depth_at = (above - outer * task.deep) * task.block;
  const int depth = min(task.block, task.depth - depth_at);
  const int plane = (outer * task.depth + depth_at) * task.height;
  return {plane + depth * height_at, plane + height_at, depth, height};
}

struct ColumnPlace {
  int first, before, width;
};

template <Walk kWalk>
__device__ inline ColumnPlace place_column(const PoolTask& task, int index) {
  const int wide = is_flat(kWalk) || task.inner == 1 ? index : task.by_inner.divide(index);
  const int at = wide * task.block, channel = index - wide * task.inner;
  const int width = min(task.block, task.width - at);
  return {at * task.inner + channel, at * task.inner + channel * width, width};
}

template <Walk kWalk>
__device__ inline BandPlace place_band(const PoolTask& task, int index) {
  BandPlace band;
  band.index = index;
  if (is_flat(kWalk) || task.cuts == 1) {
    band.first_row = index * task.group;
    band.first_column = 0;
    band.run_begin = 0;
    band.run_length = task.line;
    band.rows_before = band.first_row < task.block_rows
                           ? place_row<kWalk>(task, band.first_row).before
                           : task.tensor_rows;
    band.before = static_cast<std::int64_t>(band.rows_before) * task.line;
    return band;
  }
  band.first_row = task.by_cuts.divide(index);
  band.first_column = (index - band.first_row * task.cuts) * task.run;
  if (band.first_row >= task.block_rows) {
    band.before = static_cast<std::int64_t>(task.tensor_rows) * task.line;
    return band;
  }
  const RowPlace row = place_row<kWalk>(task, band.first_row);
  const int end = band.first_column + task.run;
  band.rows_before = row.before;
  band.run_begin = place_column<kWalk>(task, band.first_column).before;
  band.run_length =
      (end < task.columns ? place_column<kWalk>(task, end).before : task.line) - band.run_begin;
  band.before = static_cast<std::int64_t>(row.before) * task.line +
                static_cast<std::int64_t>(row.depth * row.height) * band.run_begin;
  return band;
}

// A strip of a lane. One that is not there has no elements.
struct Strip {
  std::int64_t first;  // in memory
  int elements;
  int position;  // of its first element in the band
  int place;     // of its block in the band
  int in_block;  // elements of its block, if it is the block's first strip
};

template <Walk kWalk>
__device__ inline Strip place_strip(const PoolTask& task, const BandPlace& band, int index) {
  Strip strip{0, 0, 0, 0, 0};
  const int line = task.by_run.divide(index), k = index - line * task.run;
  const int g = task.group == 1 ? 0 : task.by_rows.divide(line), r = line - g * task.rows;
  const int row_index = band.first_row + g, column_index = band.first_column + k;
  if (index >= task.slots || band.index >= task.bands || row_index >= task.block_rows ||
      column_index >= task.columns)
    return strip;
  const int d = is_flat(kWalk) || task.depth == 1 ? 0 : task.by_tall.divide(r),
            h = r - d * task.tall;
  const RowPlace row = place_row<kWalk>(task, row_index);
  if (d >= row.depth || h >= row.height) return strip;
  const ColumnPlace column = place_column<kWalk>(task, column_index);
  strip.first =
      static_cast<std::int64_t>(row.first + d * task.height + h) * task.line + column.first;
  strip.elements = column.width;
  strip.position = (row.before - band.rows_before + d * row.height + h) * band.run_length +
                   column.before - band.run_begin;
  strip.place = g * task.run + k;
  strip.in_block = r == 0 ? row.depth * row.height * column.width : 0;
  return strip;
}

// The number in its band of a lane's strip s.
template <Walk kWalk, int kOwn>
__device__ inline int strip_index(const PoolTask& task, int own_lane, int s) {
  return kWalk == Walk::kChannels ? own_lane * kOwn + s : s * task.lanes + own_lane;
}

// All strips of a lane. `elements` is those of the band.
template <Walk kWalk, int kRoom, int kOwn>
__device__ inline void place_strips(const PoolTask& task, const BandPlace& band, int elements,
                                    int own_lane, Strip (&strips)[kOwn]) {
  if constexpr (kWalk == Walk::kJoined) {
#pragma unroll
    for (int s = 0; s < kOwn; ++s) {
      const int index = strip_index<kWalk, kOwn>(task, own_lane, s);
      const int line = task.by_run.divide(index), k = index - line * task.run;
      const int g = task.group == 1 ? 0 : task.by_rows.divide(line);
      const bool there = index * kRoom < elements;
      strips[s] = {band.before + index * kRoom, there ? kRoom : 0, index * kRoom, g * task.run + k,
                   0};
      if (there && line == g * task.rows)
        strips[s].in_block = (task.group == 1 ? task.by_run.divide(elements) : task.rows * kRoom);
    }
  } else if constexpr (kWalk == Walk::kChannels) {
    strips[0] = place_strip<kWalk>(task, band, own_lane * kOwn);
#pragma unroll
    for (int s = 1; s < kOwn; ++s) {
      strips[s] = strips[0];
      strips[s].first += s;
      strips[s].position += s * strips[0].elements;
      strips[s].place += s;
    }
  } else {
#pragma unroll
    for (int s = 0; s < kOwn; ++s)
      strips[s] = place_strip<kWalk>(task, band, strip_index<kWalk, kOwn>(task, own_lane, s));
  }
}

// A block of the tensor, by its place in a band.
__device__ inline std::int64_t block_index(const PoolTask& task, const BandPlace& band, int g,
                                           int k) {
  return static_cast<std::int64_t>(band.first_row + g) * task.columns + band.first_column + k;
}

// Calls work with an element of the task's type.
template <typename Work>
__device__ inline void with_type(ElementType type, const Work& work) {
  switch (type) {
    case ElementType::kF16:
      return work(Half{});
    case ElementType::kBF16:
      return work(BFloat{});
    case ElementType::kF64:
      return work(double{});
    default:
      return work(float{});
  }
}

__device__ inline float number_of(float element) { return element; }
__device__ inline float number_of(double element) { return core::to_float(element); }
__device__ inline float number_of(BFloat element) { return core::to_float(element); }
__device__ inline float number_of(Half element) { return low_number(element.bits, Half{}); }

// What decodes far below the type's limits, or is fp16.
__device__ inline void put_number(float value, float& element) { element = value; }
__device__ inline void put_number(float value, double& element) { element = value; }
__device__ inline void put_number(float value, BFloat& element) {
  element.bits = static_cast<std::uint16_t>(join_numbers(value, value, BFloat{}));
}
__device__ inline void put_number(float value, Half& element) {
  element.bits = static_cast<std::uint16_t>(join_numbers(value, value, Half{}));
}

// Neighbouring elements moved in one or several instructions.
template <typename T, int kCount>
union Neighbours {
  using Unit = std::conditional_t<sizeof(T) * kCount == 8, uint2, uint4>;
  static constexpr int kUnits = static_cast<int>(sizeof(T) * kCount / sizeof(Unit));
  Unit units[kUnits];
  T items[kCount];

  __device__ void load(const T* from) {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) units[i] = reinterpret_cast<const Unit*>(from)[i];
  }
  __device__ void store(T* to) const {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      // Where there are several, each instruction writes halves of sectors: those are left to the
      // cache to join.
      if constexpr (kUnits == 1) {
        __stcs(reinterpret_cast<Unit*>(to) + i, units[i]);
      } else {
        reinterpret_cast<Unit*>(to)[i] = units[i];
      }
    }
  }
};

// The elements of a lane's strips; `from` is where an offset of 0 is.
template <Walk kWalk, int kRoom, int kOwn, typename T>
__device__ inline void load_strips(const T* from, const PoolTask& task, const Strip (&strips)[kOwn],
                                   std::int64_t origin, float (&x)[kOwn][kRoom]) {
  if constexpr (kWalk == Walk::kJoined) {
#pragma unroll
    for (int s = 0; s < kOwn; ++s) {
      Neighbours<T, kRoom> strip = {};
      if (strips[s].elements != 0) strip.load(from + strips[s].first);
#pragma unroll
      for (int j = 0; j < kRoom; ++j) x[s][j] = number_of(strip.items[j]);
    }
  } else if constexpr (kWalk == Walk::kChannels) {
    const T* own = from + strips[0].first;
    Neighbours<T, kOwn> positions[kRoom] = {};
#pragma unroll
    for (int j = 0; j < kRoom; ++j) {
      if (j < strips[0].elements) positions[j].load(own);
      own += task.inner;
    }
#pragma unroll
    for (int j = 0; j < kRoom; ++j) {
#pragma unroll
      for (int s = 0; s < kOwn; ++s) x[s][j] = number_of(positions[j].items[s]);
    }
  } else {
#pragma unroll
    for (int s = 0; s < kOwn; ++s) {
      const T* own = from + (strips[s].first - origin);
#pragma unroll
      for (int j = 0; j < kRoom; ++j) {
        x[s][j] = j < strips[s].elements ? number_of(*own) : 0.0f;
        own += kWalk == Walk::kStaged ? 1 : task.inner;
      }
    }
  }
}

// The inverse of load_strips(), for whole strips of kJoined and any of the others.
template <Walk kWalk, int kRoom, int kOwn, typename T>
__device__ inline void store_strips(const T (&values)[kOwn][kRoom], const PoolTask& task,
                                    const Strip (&strips)[kOwn], std::int64_t origin, T* to) {
  if constexpr (kWalk == Walk::kJoined) {
#pragma unroll
    for (int s = 0; s < kOwn; ++s) {
      Neighbours<T, kRoom> strip;
#pragma unroll
      for (int j = 0; j < kRoom; ++j) strip.items[j] = values[s][j];
      if (strips[s].elements != 0) strip.store(to + strips[s].first);
    }
  } else if constexpr (kWalk == Walk::kChannels) {
    T* own = to + strips[0].first;
#pragma unroll
    for (int j = 0; j < kRoom; ++j) {
      Neighbours<T, kOwn> position;
#pragma unroll
      for (int s = 0; s < kOwn; ++s) position.items[s] = values[s][j];
      if (j < strips[0].elements) position.store(own);
      own += task.inner;
    }
  } else {
#pragma unroll
    for (int s = 0; s < kOwn; ++s) {
      T* own = to + (strips[s].first - origin);
#pragma unroll
      for (int j = 0; j < kRoom; ++j) {
        if (j < strips[s].elements) *own = values[s][j];
        own += kWalk == Walk::kStaged ? 1 : task.inner;
      }
    }
  }
}

// Elements begin to end of the tensor, to or from shared memory at the same place within 16 bytes.
struct Stage {
  char* shared;  // where the first one is
  char* global;
  int bytes;

  __device__ Stage(const PoolTask& task, char* room, int size, std::int64_t begin,
                   std::int64_t end) {
    global = static_cast<char*>(task.elements) + begin * size;
    shared = room + (reinterpret_cast<std::uintptr_t>(global) & 15u);
    bytes = static_cast<int>(end - begin) * size;
  }
  // Calls whole(offset) for 16 aligned bytes, part(offset) for the elements before and after them.
  template <typename Whole, typename Part>
  __device__ void for_pieces(int size, const Whole& whole, const Part& part) const {
    const int lane = threadIdx.x % 32;
    const int head = min(bytes, static_cast<int>(-reinterpret_cast<std::uintptr_t>(global) & 15u));
    const int body = head + (bytes - head) / 16 * 16;
    for (int at = head + 16 * lane; at < body; at += 16 * 32) whole(at);
    if (lane * size < head) part(lane * size);
    if (body + lane * size < bytes) part(body + lane * size);
  }
};

template <typename T>
__device__ inline void stage_in(const Stage& stage) {
  stage.for_pieces(
      sizeof(T), [&](int at) { __pipeline_memcpy_async(stage.shared + at, stage.global + at, 16); },
      [&](int at) {
        *reinterpret_cast<T*>(stage.shared + at) = *reinterpret_cast<const T*>(stage.global + at);
      });
  __pipeline_commit();
  __pipeline_wait_prior(0);
  __syncwarp();
}

template <typename T>
__device__ inline void stage_out(const Stage& stage) {
  __syncwarp();
  stage.for_pieces(
      sizeof(T),
      [&](int at) {
        __stcs(reinterpret_cast<uint4*>(stage.global + at),
               *reinterpret_cast<const uint4*>(stage.shared + at));
      },
      [&](int at) {
        *reinterpret_cast<T*>(stage.global + at) = *reinterpret_cast<const T*>(stage.shared + at);
      });
}

}  // namespace backfold::cuda

#endif  // BACKFOLD_CUDA_POOL_TILE_CUH_
