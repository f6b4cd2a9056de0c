// SPDX-License-Identifier: Apache-2.0
//
// Kernels for groups that run down the columns of a matrix.
//
// A thread block takes 128 rows of kAcross * 16 bytes: a warp reads whole rows of the tile, full
// lines, and a lane keeps 16 bytes of columns from eight rows, 2r, 2r + 1 and the same 32, 64 and
// 96 further down. Those eight elements of a column are one block of codes (rng.h, group.h). Codes
// pass through shared memory, where each column's are put together, so that the payload too is
// touched in whole lines.

#ifndef BACKFOLD_GROUP_CUDA_STRIDED_CUH_
#define BACKFOLD_GROUP_CUDA_STRIDED_CUH_

#include <type_traits>

#include "base/cuda/elements.cuh"
#include "group/cuda/codes.cuh"
#include "group/cuda/range.cuh"
#include "group/cuda/special.cuh"

namespace backfold::cuda {

inline constexpr int kStridedRows = 128;
inline constexpr int kRowBlocks = kStridedRows / core::kRandomBlock;

// A tile is kAcross vectors wide. One thread holds eight of the rows of one vector; 64 registers
// each, as more loads in flight are worth more than registers here.
// Values scaled by row are kept as fp32: of 16-bit types that takes twice the registers.
template <typename T, int kAcross, bool kScaled = false>
struct StridedShape {
  static constexpr int kV = kVector<T>;
  static constexpr int kColumns = kAcross * kV;
  static constexpr int kThreads = kAcross * kRowBlocks;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kRegisters = !kScaled ? 64 : sizeof(T) == 2 ? 128 : 84;
  static constexpr int kResident = 65536 / kRegisters / kThreads;
};

BACKFOLD_HD constexpr int log2_of(int power) { return power <= 1 ? 0 : 1 + log2_of(power / 2); }

// One plane of a tile's codes in shared memory: 16 * width bytes per column, in units of 16 bytes
// that are exchanged so that lanes of neighbouring columns use different banks.
template <int kWidth, int kColumns, int kV>
struct TilePlane {
  uint4 units[kColumns * kWidth];

  // A lane's columns follow each other, so the column's upper bits tell the lanes apart.
  __device__ static int place(int unit) {
    constexpr int kShift = log2_of(kV * kWidth);
    return unit ^ (unit >> kShift & 7);
  }

  // The kWidth bytes of a column's block of codes.
  __device__ std::uint8_t* block(int column, int block) {
    const int byte = kWidth * block;
    return reinterpret_cast<std::uint8_t*>(&units[place(column * kWidth + byte / 16)]) + byte % 16;
  }
};

template <int kBits, int kColumns, int kV>
struct TileCodes {
  static constexpr core::Planes kPlanes = core::planes_of(kBits);
  static constexpr int kLow = kPlanes.low;
  static constexpr int kHigh = kPlanes.high == 0 ? 1 : kPlanes.high;
  static constexpr bool kTwo = kPlanes.high != 0;
  TilePlane<kLow, kColumns, kV> low;
  TilePlane<kHigh, kTwo ? kColumns : 1, kV> high;

  __device__ void put(int column, int block, const LaneCodes<kBits, 1>& codes) {
    codes.low.store(low.block(column, block));
    if constexpr (kTwo) codes.high.store(high.block(column, block));
  }
  __device__ LaneCodes<kBits, 1> get(int column, int block) {
    LaneCodes<kBits, 1> codes;
    codes.low.load(low.block(column, block));
    if constexpr (kTwo) codes.high.load(high.block(column, block));
    return codes;
  }
  // Unit number `unit` of a column's codes as they stand in the payload.
  __device__ uint4& unit_at(int column, int unit) {
    if constexpr (kTwo)
      if (unit >= kLow) return high.units[high.place(column * kHigh + unit - kLow)];
    return low.units[low.place(column * kLow + unit)];
  }
};

// Where a thread block and its threads are.
template <typename T, int kAcross>
struct StridedTile {
  static constexpr int kColumns = StridedShape<T, kAcross>::kColumns;
  std::int64_t row, column;  // the tile's first
  std::int64_t group;        // of the tile's first column
  int rows, columns;         // that the matrix has there
  int vector;                // which 16 bytes of a row this lane holds
  int block;                 // which eight rows

  __device__ explicit StridedTile(const GroupTask& task) {
    const unsigned down = blockIdx.x / task.tiles_across;
    row = static_cast<std::int64_t>(down) * kStridedRows;
    column = static_cast<std::int64_t>(blockIdx.x - down * task.tiles_across) * kColumns;
    group = static_cast<std::int64_t>(down) * task.columns + column;
    const std::int64_t rows_left = task.rows - row;
    const std::int64_t columns_left = task.columns - column;
    rows = static_cast<int>(rows_left < kStridedRows ? rows_left : kStridedRows);
    columns = static_cast<int>(columns_left < kColumns ? columns_left : kColumns);
    vector = threadIdx.x % kAcross;
    block = threadIdx.x / kAcross;
  }

  // Row of the lane's element number `index` in a column's block of eight.
  __device__ int row_of(int index) const { return index % 4 * 32 + 2 * block + index / 4; }
};

// The units of a tile's codes that one thread brings to shared memory. All are loaded before the
// first is stored.
template <typename T, int kAcross, int kBits>
struct TileUnits {
  using Shape = StridedShape<T, kAcross>;
  static constexpr int kUnits = (Shape::kColumns * kBits + Shape::kThreads - 1) / Shape::kThreads;
  uint4 units[kUnits];

  __device__ void load(const GroupTask& task, const StridedTile<T, kAcross>& tile) {
    const uint4* payload = reinterpret_cast<const uint4*>(task.codes) + tile.group * kBits;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int i = u * Shape::kThreads + threadIdx.x;
      if (i < tile.columns * kBits) units[u] = payload[i];
    }
  }
  __device__ void place(const StridedTile<T, kAcross>& tile,
                        TileCodes<kBits, Shape::kColumns, Shape::kV>& codes) const {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int i = u * Shape::kThreads + threadIdx.x;
      if (i < tile.columns * kBits) codes.unit_at(i / kBits, i % kBits) = units[u];
    }
  }
};

// The values of a lane's vector: elements as they were loaded, or numbers already.
template <typename T>
__device__ inline void values_of(const uint4& raw, float (&x)[kVector<T>]) {
  to_floats<T>(raw, x);
}
template <typename T>
__device__ inline void values_of(const float (&values)[kVector<T>], float (&x)[kVector<T>]) {
#pragma unroll
  for (int j = 0; j < kVector<T>; ++j) x[j] = values[j];
}

// Columns' extremes over a lane's eight rows, then over the warp's.
template <typename T, int kAcross, bool kZeroExact, typename Loaded>
__device__ inline void column_extremes(const Loaded& raw, Extremes (&extremes)[kVector<T>]) {
  constexpr int kV = kVector<T>;
  constexpr bool kScaled = !std::is_same_v<Loaded, uint4[8]>;
  if constexpr (sizeof(T) == 2 && !kZeroExact && !kScaled) {
    const auto reduced = [&](auto word_of, Extremes& first, Extremes& second) {
      std::uint32_t low = word_of(raw[0]), high = low;
#pragma unroll
      for (int i = 1; i < 8; ++i) {
        low = min2(low, word_of(raw[i]), T{});
        high = max2(high, word_of(raw[i]), T{});
      }
#pragma unroll
      for (int distance = kAcross; distance < 32; distance *= 2) {
        low = min2(low, __shfl_xor_sync(kFullWarp, low, distance), T{});
        high = max2(high, __shfl_xor_sync(kFullWarp, high, distance), T{});
      }
      first = {low_number(low, T{}), low_number(high, T{})};
      second = {high_number(low, T{}), high_number(high, T{})};
    };
    reduced([](const uint4& v) { return v.x; }, extremes[0], extremes[1]);
    reduced([](const uint4& v) { return v.y; }, extremes[2], extremes[3]);
    reduced([](const uint4& v) { return v.z; }, extremes[4], extremes[5]);
    reduced([](const uint4& v) { return v.w; }, extremes[6], extremes[7]);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float x[kV];
      values_of<T>(raw[i], x);
#pragma unroll
      for (int j = 0; j < kV; ++j) {
        const float low = kZeroExact ? positive_low(x[j]) : x[j];
        extremes[j].low = i == 0 ? low : min_nan(extremes[j].low, low);
        extremes[j].high = i == 0 ? x[j] : max_nan(extremes[j].high, x[j]);
      }
    }
#pragma unroll
    for (int j = 0; j < kV; ++j) {
      if (kZeroExact) extremes[j].high = max_nan(extremes[j].high, 0x1p-126f);
#pragma unroll
      for (int distance = kAcross; distance < 32; distance *= 2) {
        extremes[j].low =
            min_nan(extremes[j].low, __shfl_xor_sync(kFullWarp, extremes[j].low, distance));
        extremes[j].high =
            max_nan(extremes[j].high, __shfl_xor_sync(kFullWarp, extremes[j].high, distance));
      }
    }
  }
}

// Columns off the fast path, a warp each. Out of line and from scratch, so that nothing is kept in
// registers for them.
template <typename T, int kAcross, bool kScaled>
__device__ __noinline__ void pack_special_columns(const GroupTask& task, const float2* draws) {
  const StridedTile<T, kAcross> tile(task);
  const T* source = static_cast<const T*>(task.source) + tile.row * task.columns + tile.column;
  for (int column = threadIdx.x / 32; column < tile.columns;
       column += StridedShape<T, kAcross>::kWarps)
    if (draws[column].y == 0.0f)
      pack_special<T, kScaled>(task, tile.group + column, source + column, task.columns, tile.rows);
}
template <typename T, int kAcross, bool kScaled>
__device__ __noinline__ void unpack_special_columns(const GroupTask& task, const bool* off_path) {
  const StridedTile<T, kAcross> tile(task);
  T* destination = static_cast<T*>(task.destination) + tile.row * task.columns + tile.column;
  for (int column = threadIdx.x / 32; column < tile.columns;
       column += StridedShape<T, kAcross>::kWarps)
    if (off_path[column])
      unpack_special<T, kScaled>(task, tile.group + column, destination + column, task.columns,
                                 tile.rows);
}

// Mapping    thread block = 128 rows x kAcross * 16 bytes; lane = 16 bytes of columns x 8 rows
// Launch     blocks of 16 * kAcross, one tile each, a grid as large as the work
// Alignment  16-byte loads when every row allows, else by element
// Bytes      source once in whole lines, headers and codes once
template <typename T, int kAcross, int kBits, bool kZeroExact, bool kScaled = false>
__global__ void __launch_bounds__(StridedShape<T, kAcross>::kThreads,
                                  StridedShape<T, kAcross, kScaled>::kResident)
    pack_strided_kernel(const __grid_constant__ GroupTask task) {
  using Shape = StridedShape<T, kAcross>;
  constexpr int kV = Shape::kV, kColumns = Shape::kColumns;
  constexpr core::Levels kLevels = core::levels_for(kBits, kZeroExact, false);
  __shared__ TileCodes<kBits, kColumns, kV> tile_codes;
  __shared__ Extremes warp_extremes[Shape::kWarps][kColumns];
  __shared__ float2
      draws[kColumns];  // base and 1 / step; 1 / step is 0 for a column off the fast path

  zero_header_padding(task);
  const StridedTile<T, kAcross> tile(task);
  const T* source = static_cast<const T*>(task.source) + tile.row * task.columns + tile.column;
  const int first_column = tile.vector * kV;
  // Whole columns take the fast path. fp64 elements may be positive and round to zero: not here.
  const bool fast = tile.rows == kStridedRows && !(kZeroExact && sizeof(T) == 8);

  uint4 raw[8] = {};
  if (fast && first_column < tile.columns) {
    const T* first = source + first_column;
    load_vectors<8, T>(
        raw, [&](int i) { return first + tile.row_of(i) * task.columns; }, task.aligned,
        tile.columns - first_column);
  }

  // What is packed: the elements themselves, or their scaled values.
  std::conditional_t<kScaled, float[8][kV], uint4[8]> loaded;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if constexpr (kScaled) {
      to_floats<T>(raw[i], loaded[i]);
      if (fast && first_column < tile.columns)
        scale_values(task.scaled,
                     (tile.row + tile.row_of(i)) * task.columns + tile.column + first_column,
                     loaded[i]);
    } else {
      loaded[i] = raw[i];
    }
  }

  if (fast) {
    Extremes extremes[kV];
    column_extremes<T, kAcross, kZeroExact>(loaded, extremes);
    if (threadIdx.x % 32 < kAcross) {
#pragma unroll
      for (int j = 0; j < kV; ++j) warp_extremes[threadIdx.x / 32][first_column + j] = extremes[j];
    }
  }
  __syncthreads();
  if (threadIdx.x < kColumns) {
    draws[threadIdx.x] = {};
    if (fast && threadIdx.x < tile.columns) {
      Extremes extremes = warp_extremes[0][threadIdx.x];
#pragma unroll
      for (int warp = 1; warp < Shape::kWarps; ++warp) {
        extremes.low = min_nan(extremes.low, warp_extremes[warp][threadIdx.x].low);
        extremes.high = max_nan(extremes.high, warp_extremes[warp][threadIdx.x].high);
      }
      if (extremes.plain()) {
        const core::Range range =
            core::round_outward(extremes.low, extremes.high, kLevels, core::kFinite);
        task.headers[tile.group + threadIdx.x] = range.header;
        draws[threadIdx.x] = {range.base, range.inverse};
      }
    }
  }
  __syncthreads();

  if (fast) {
#pragma unroll
    for (int j = 0; j < kV; ++j) {
      const float2 draw = draws[first_column + j];
      const std::uint64_t first_block = static_cast<std::uint64_t>(tile.group + first_column + j) *
                                        (kStridedRows / core::kRandomBlock);
      const std::uint32_t hash = core::block_hash(
          core::block_offset(task.key, first_block), task.key.second,
          static_cast<std::uint32_t>(first_block) + static_cast<unsigned>(tile.block));
      LaneCodes<kBits, 1> codes;
      codes.start(true);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float x[kV];
        values_of<T>(loaded[i], x);
        const float uniform = core::unit_interval(hash * core::element_multiplier(i));
        codes.add(i, draw_element<kZeroExact>(x[j], draw.x, draw.y, uniform, kLevels.ceiling));
      }
      tile_codes.put(first_column + j, tile.block, codes);
    }
  }
  __syncthreads();

  uint4* payload = reinterpret_cast<uint4*>(task.codes) + tile.group * kBits;
  for (int i = threadIdx.x; i < kColumns * kBits; i += Shape::kThreads) {
    const int column = i / kBits;
    if (column < tile.columns && draws[column].y != 0.0f)
      payload[i] = tile_codes.unit_at(column, i % kBits);
  }
  const bool special = threadIdx.x < tile.columns && draws[threadIdx.x].y == 0.0f;
  if (__syncthreads_or(special)) pack_special_columns<T, kAcross, kScaled>(task, draws);
}

// Mapping    as packing
// Launch     as packing
// Alignment  16-byte stores when every row allows, else by element
// Bytes      headers and codes once, destination once in whole lines
template <typename T, int kAcross, int kBits, bool kZeroExact, bool kScaled = false>
__global__ void __launch_bounds__(StridedShape<T, kAcross>::kThreads,
                                  StridedShape<T, kAcross, kScaled>::kResident)
    unpack_strided_kernel(const __grid_constant__ GroupTask task) {
  using Shape = StridedShape<T, kAcross>;
  constexpr int kV = Shape::kV, kColumns = Shape::kColumns;
  constexpr core::Levels kLevels = core::levels_for(kBits, kZeroExact, false);
  __shared__ TileCodes<kBits, kColumns, kV> tile_codes;
  __shared__ core::Grid grids[kColumns];
  __shared__ bool off_path[kColumns];

  const StridedTile<T, kAcross> tile(task);
  T* destination = static_cast<T*>(task.destination) + tile.row * task.columns + tile.column;
  const int first_column = tile.vector * kV;
  const bool fast = tile.rows == kStridedRows;

  // All loads first, then what waits for them.
  const std::uint32_t header =
      threadIdx.x < tile.columns ? task.headers[tile.group + threadIdx.x] : 0u;
  TileUnits<T, kAcross, kBits> units;
  if (fast) {
    units.load(task, tile);
    units.place(tile, tile_codes);
  }
  bool any_special = false;
  if (threadIdx.x < tile.columns) {
    const core::Grid grid = core::grid_in(header, kLevels);
    const bool plain = fast && is_plain(header, grid, kLevels);
    grids[threadIdx.x] = grid;
    off_path[threadIdx.x] = !plain;
    any_special = !plain;
  }
  any_special = __syncthreads_or(any_special);

  if (fast && first_column < tile.columns) {
    float x[8][kV];
#pragma unroll
    for (int j = 0; j < kV; ++j) {
      const Decoder<kBits, 1> decoder(grids[first_column + j]);
      const LaneCodes<kBits, 1> codes = tile_codes.get(first_column + j, tile.block);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i][j] = decoder.template value<T, kZeroExact>(codes, i);
    }
    uint4 raw[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if constexpr (kScaled) {
        restore_values(task.scaled,
                       (tile.row + tile.row_of(i)) * task.columns + tile.column + first_column,
                       x[i]);
        raw[i] = from_restored<T>(x[i]);
      } else {
        raw[i] = from_floats<T>(x[i]);
      }
    }
    T* first = destination + first_column;
    store_vectors<8, T>(
        raw, [&](int i) { return first + tile.row_of(i) * task.columns; }, task.aligned,
        tile.columns - first_column);
  }
  if (!any_special) return;
  __syncthreads();  // the stores above cover these columns too
  unpack_special_columns<T, kAcross, kScaled>(task, off_path);
}

// Packing wants small tiles (bf16: 0.96 of a copy against 0.91), unpacking wide rows (0.92 against
// 0.89).
inline constexpr int kPackAcross = 8;
inline constexpr int kUnpackAcross = 16;

template <typename T, int kBits, bool kZeroExact, bool kScaled = false>
Status launch_strided(GroupTask task, bool pack, cudaStream_t stream) {
  using PackShape = StridedShape<T, kPackAcross>;
  using UnpackShape = StridedShape<T, kUnpackAcross>;
  const int columns = pack ? PackShape::kColumns : UnpackShape::kColumns;
  const std::int64_t across = (task.columns + columns - 1) / columns;
  const std::int64_t down = (task.rows + kStridedRows - 1) / kStridedRows;
  unsigned blocks = 0;
  const Status fits = blocks_for(across * down, 1, &blocks);
  if (!fits.ok()) return fits;
  task.tiles_across = static_cast<unsigned>(across);
  if (pack) {
    pack_strided_kernel<T, kPackAcross, kBits, kZeroExact, kScaled>
        <<<blocks, PackShape::kThreads, 0, stream>>>(task);
  } else {
    unpack_strided_kernel<T, kUnpackAcross, kBits, kZeroExact, kScaled>
        <<<blocks, UnpackShape::kThreads, 0, stream>>>(task);
  }
  return check_launch("group kernel");
}

}  // namespace backfold::cuda

#endif  // BACKFOLD_GROUP_CUDA_STRIDED_CUH_
