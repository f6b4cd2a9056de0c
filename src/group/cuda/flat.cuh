// SPDX-License-Identifier: Apache-2.0
//
// Kernels for groups of contiguous elements: flat and rotated.

#ifndef BACKFOLD_GROUP_CUDA_FLAT_CUH_
#define BACKFOLD_GROUP_CUDA_FLAT_CUH_

#include "base/cuda/elements.cuh"
#include "group/cuda/codes.cuh"
#include "group/cuda/range.cuh"
#include "group/cuda/rotation.cuh"
#include "group/cuda/special.cuh"

namespace backfold::cuda {

inline constexpr int kFlatThreads = 256;

// Thread blocks that must fit on a multiprocessor: what limits these kernels is loads in flight, so
// a register less is a warp more. 65,536 registers / 256 threads / blocks: 64, 48, 40.
// Values scaled by row take some more.
template <typename T>
__host__ __device__ constexpr int flat_pack_blocks(bool rotated, bool scaled = false) {
  if (scaled) return sizeof(T) == 2 ? 3 : 4;
  return sizeof(T) == 2 ? (rotated ? 4 : 5) : (rotated ? 5 : 6);
}
__host__ __device__ constexpr int flat_unpack_blocks(bool rotated, bool scaled = false) {
  return scaled ? 4 : rotated ? 5 : 6;
}

// Of this warp, in its grid.
__device__ inline std::int64_t warp_number() {
  return static_cast<std::int64_t>(blockIdx.x) * (kFlatThreads / 32) + threadIdx.x / 32;
}

// How a group lies over the lanes of a warp.
template <typename T>
struct FlatShape {
  static constexpr int kV = kVector<T>;
  static constexpr int kLanes = kGroup / 4 / kV;      // per group
  static constexpr int kGroupsPerWarp = 32 / kLanes;  // at a time
  static constexpr int kBlocks = kV / 2;              // of eight codes per lane
  static constexpr int kGroupsPerThreadBlock = kGroupsPerWarp * (kFlatThreads / 32);
};

// The extremes of a lane's elements.
template <typename T, bool kZeroExact, bool kScaled = false>
__device__ inline Extremes lane_extremes(const uint4 (&raw)[4], const float (&x)[4][kVector<T>]) {
  if constexpr (sizeof(T) == 2 && !kZeroExact && !kScaled) {
    std::uint32_t low = raw[0].x, high = raw[0].x;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      low = min2(min2(low, raw[k].x, T{}), min2(raw[k].y, min2(raw[k].z, raw[k].w, T{}), T{}), T{});
      high =
          max2(max2(high, raw[k].x, T{}), max2(raw[k].y, max2(raw[k].z, raw[k].w, T{}), T{}), T{});
    }
    return {min_nan(low_number(low, T{}), high_number(low, T{})),
            max_nan(low_number(high, T{}), high_number(high, T{}))};
  } else {
    Extremes extremes{__int_as_float(0x7f80'0000), __int_as_float(0xff80'0000)};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int j = 0; j < kVector<T>; ++j) {
        const float low = kZeroExact ? positive_low(x[k][j]) : x[k][j];
        extremes.low = min_nan(extremes.low, low);
        extremes.high = max_nan(extremes.high, x[k][j]);
      }
    }
    if (kZeroExact) extremes.high = max_nan(extremes.high, 0x1p-126f);
    return extremes;
  }
}

// The groups of a warp that are off the fast path; bit l of `special` stands for the group of lane
// l. Out of line and from scratch, so that nothing is kept in registers for it.
template <typename T>
__device__ inline std::int64_t take_special(unsigned& special) {
  using Shape = FlatShape<T>;
  const std::int64_t warp = warp_number();
  const int lane = __ffs(static_cast<int>(special)) - 1;
  special &= special - 1;
  return warp * Shape::kGroupsPerWarp + lane / Shape::kLanes;
}
__device__ inline int elements_of(const GroupTask& task, std::int64_t group) {
  const std::int64_t left = task.count - group * task.group;
  return static_cast<int>(left < task.group ? left : task.group);
}
template <typename T, bool kScaled>
__device__ __noinline__ void pack_specials(const GroupTask& task, unsigned special) {
  while (special != 0) {
    const std::int64_t group = take_special<T>(special);
    pack_special<T, kScaled>(task, group, static_cast<const T*>(task.source) + group * kGroup, 1,
                             elements_of(task, group));
  }
}
template <typename T, bool kScaled>
__device__ __noinline__ void unpack_specials(const GroupTask& task, unsigned special) {
  while (special != 0) {
    const std::int64_t group = take_special<T>(special);
    unpack_special<T, kScaled>(task, group, static_cast<T*>(task.destination) + group * kGroup, 1,
                               elements_of(task, group));
  }
}

// Mapping    one group = 2 * sizeof(T) lanes, each 16 bytes from each quarter of the group
// Launch     blocks of 256, one tile of 32 / lanes groups per warp, a grid as large as the work
// Alignment  16-byte loads when the source allows, else by element
// Bytes      source once, headers and codes once
template <typename T, int kBits, bool kZeroExact, bool kRotated, bool kScaled = false>
__global__ void __launch_bounds__(kFlatThreads, flat_pack_blocks<T>(kRotated, kScaled))
    pack_flat_kernel(const __grid_constant__ GroupTask task) {
  using Shape = FlatShape<T>;
  constexpr int kV = Shape::kV;
  constexpr core::Levels kLevels = core::levels_for(kBits, kZeroExact, false);
  const T* source = static_cast<const T*>(task.source);
  const int warp_lane = threadIdx.x % 32, lane = warp_lane % Shape::kLanes;
  const std::int64_t warp = warp_number();
  const std::int64_t group = warp * Shape::kGroupsPerWarp + warp_lane / Shape::kLanes;
  const bool whole = (group + 1) * kGroup <= task.count;
  zero_header_padding(task);

  uint4 raw[4] = {};
  if (whole) {
    const T* first = source + group * kGroup + lane * kV;
    load_vectors<4, T>(
        raw, [&](int k) { return first + k * (kGroup / 4); }, task.aligned, kV);
  }
  bool plain = whole;
  if constexpr (kRotated) {
    const bool constant = lanes_constant<T, Shape::kLanes>(raw, warp_lane);  // by every lane
    plain = plain && !constant;
#pragma unroll
    for (int k = 0; k < 4; ++k) raw[k] = flip_vector<T>(raw[k], k, lane);
  }
  float x[4][kV];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    to_floats<T>(raw[k], x[k]);
    if constexpr (kScaled) {
      if (whole) scale_values(task.scaled, group * kGroup + k * (kGroup / 4) + lane * kV, x[k]);
    }
  }

  core::Range range;
  if constexpr (kRotated) {
    lanes_hadamard<T>(x, lane);
    const Extremes extremes = rotated_extremes<T, Shape::kLanes>(x);
    plain = plain && extremes.within_limits();
    range = core::round_outward_rotated(extremes.low, extremes.high, kLevels);
  } else {
    if constexpr (kZeroExact && sizeof(T) == 8) {
      // Positive in fp64 stays positive in fp32.
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const double* elements = reinterpret_cast<const double*>(&raw[k]);
#pragma unroll
        for (int j = 0; j < kV; ++j)
          if (elements[j] > 0.0) x[k][j] = fmaxf(x[k][j], 0x1p-126f);
      }
    }
    const Extremes extremes =
        across_lanes<Shape::kLanes>(lane_extremes<T, kZeroExact, kScaled>(raw, x));
    plain = plain && extremes.plain();
    range = core::round_outward(extremes.low, extremes.high, kLevels, core::kFinite);
  }

  if (plain) {
    if (lane == 0) task.headers[group] = range.header;
    const std::uint64_t first_block =
        static_cast<std::uint64_t>(group) * (kGroup / core::kRandomBlock);
    const std::uint32_t offset = core::block_offset(task.key, first_block);
    const std::uint32_t lane_block =
        static_cast<std::uint32_t>(first_block) + static_cast<unsigned>(lane * Shape::kBlocks);
    LaneCodes<kBits, Shape::kBlocks> codes;
    codes.start(true);
#pragma unroll
    for (int block = 0; block < Shape::kBlocks; ++block) {
      const std::uint32_t hash =
          core::block_hash(offset, task.key.second, lane_block + static_cast<unsigned>(block));
#pragma unroll
      for (int code = 0; code < 8; ++code) {
        const float uniform = core::unit_interval(hash * core::element_multiplier(code));
        codes.add(8 * block + code,
                  draw_element<kZeroExact>(x[code % 4][2 * block + code / 4], range.base,
                                           range.inverse, uniform, kLevels.ceiling));
      }
    }
    codes.store(task.codes + group * (kGroup * kBits / 8), lane);
  }

  const unsigned special = __ballot_sync(kFullWarp, lane == 0 && !plain && group < task.groups);
  if (special != 0) pack_specials<T, kScaled>(task, special);
}

// A lane's part of a group to restore. Zeros for lanes past the last whole group.
template <typename T, int kBits>
struct LoadedGroup {
  using Shape = FlatShape<T>;
  LaneCodes<kBits, Shape::kBlocks> codes;
  std::uint32_t header = 0;
  std::int64_t group;  // number of the group
  int lane;            // of the group's lanes
  bool whole;

  __device__ explicit LoadedGroup(const GroupTask& task) {
    const int warp_lane = threadIdx.x % 32;
    const std::int64_t warp = warp_number();
    group = warp * Shape::kGroupsPerWarp + warp_lane / Shape::kLanes;
    lane = warp_lane % Shape::kLanes;
    whole = (group + 1) * kGroup <= task.count;
    codes.start(false);
    if (whole) {
      header = task.headers[group];
      codes.load(task.codes + group * (kGroup * kBits / 8), lane);
    }
  }
  // Bit l stands for the group of lane l: those to leave to unpack_specials().
  __device__ unsigned specials(const GroupTask& task, bool plain) const {
    return __ballot_sync(kFullWarp, lane == 0 && !plain && group < task.groups);
  }
};

// Mapping    codes are loaded as packing stored them, then handed round: each store of a warp
//            covers 512 neighbouring bytes, worth 3 to 5 points of copy bandwidth over four pieces
//            of 128
// Launch     as packing
// Alignment  16-byte stores when the destination allows, else by element
// Bytes      headers and codes once, destination once
template <typename T, int kBits, bool kZeroExact, bool kScaled = false>
__global__ void __launch_bounds__(kFlatThreads, flat_unpack_blocks(false, kScaled))
    unpack_flat_kernel(const __grid_constant__ GroupTask task) {
  using Shape = FlatShape<T>;
  constexpr int kV = Shape::kV;
  constexpr core::Levels kLevels = core::levels_for(kBits, kZeroExact, false);
  const LoadedGroup<T, kBits> own(task);
  const core::Grid own_grid = core::grid_in(own.header, kLevels);
  const bool plain = own.whole && is_plain(own.header, own_grid, kLevels);
  const unsigned plain_lanes = __ballot_sync(kFullWarp, plain);

  const int warp_lane = threadIdx.x % 32;
  const std::int64_t first_group = own.group - warp_lane / Shape::kLanes;
  T* tile = static_cast<T*>(task.destination) + first_group * kGroup;
  uint4 raw[4];
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const int first = (32 * step + warp_lane) * kV;  // element of the tile
    const int quarter = first % kGroup / (kGroup / 4);
    const int from = first / kGroup * Shape::kLanes + first % (kGroup / 4) / kV;
    const core::Grid grid{__shfl_sync(kFullWarp, own_grid.base, from),
                          __shfl_sync(kFullWarp, own_grid.step, from)};
    const LaneCodes<kBits, Shape::kBlocks> codes = own.codes.from_lane(from);
    float x[kV];
#pragma unroll
    for (int j = 0; j < kV; ++j)
      x[j] = value_of_element<T, kZeroExact>(codes.get(4 * j, quarter), grid);
    if constexpr (kScaled) {
      const std::int64_t element = first_group * kGroup + first;
      if (element < task.count) restore_values(task.scaled, element, x);
      raw[step] = from_restored<T>(x);
    } else {
      raw[step] = from_floats<T>(x);
    }
  }
  const auto stored = [&](int step) {
    return plain_lanes >> (32 * step + warp_lane) * kV / kGroup * Shape::kLanes & 1u;
  };
  if (task.aligned) {
#pragma unroll
    for (int step = 0; step < 4; ++step)
      if (stored(step))
        __stcs(reinterpret_cast<uint4*>(tile + (32 * step + warp_lane) * kV), raw[step]);
  } else {
#pragma unroll
    for (int step = 0; step < 4; ++step)
      if (stored(step)) store_elements<T>(tile + (32 * step + warp_lane) * kV, raw[step], kV);
  }
  const unsigned special = own.specials(task, plain);
  if (special != 0) unpack_specials<T, kScaled>(task, special);
}

// Mapping    as packing
// Launch     as packing
// Alignment  16-byte stores when the destination allows, else by element
// Bytes      headers and codes once, destination once
template <typename T, int kBits>
__global__ void __launch_bounds__(kFlatThreads, flat_unpack_blocks(true))
    unpack_rotated_kernel(const __grid_constant__ GroupTask task) {
  static_assert(kGroup == core::kRotation);
  using Shape = FlatShape<T>;
  constexpr int kV = Shape::kV;
  constexpr core::Levels kLevels = core::levels_for(kBits, false, false);
  const LoadedGroup<T, kBits> own(task);
  const core::Grid grid = core::grid_in(own.header, kLevels);
  const bool plain =
      own.whole && (own.header & core::kExtended) == 0 && is_plain(own.header, grid, kLevels);
  const Decoder<kBits, Shape::kBlocks> decoder(core::scaled_for_rotation(grid));
  float x[4][kV];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
#pragma unroll
    for (int j = 0; j < kV; ++j) x[k][j] = decoder.template value<T, false>(own.codes, 4 * j + k);
  }
  lanes_hadamard<T>(x, own.lane);
  if (plain) {
    T* first = static_cast<T*>(task.destination) + own.group * kGroup + own.lane * kV;
    uint4 raw[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) raw[k] = flip_vector<T>(from_floats<T>(x[k]), k, own.lane);
    store_vectors<4, T>(
        raw, [&](int k) { return first + k * (kGroup / 4); }, task.aligned, kV);
  }
  const unsigned special = own.specials(task, plain);
  if (special != 0) unpack_specials<T, false>(task, special);
}

template <typename T, int kBits, bool kZeroExact, bool kRotated, bool kScaled = false>
Status launch_flat(const GroupTask& task, bool pack, cudaStream_t stream) {
  unsigned blocks = 0;
  const Status fits = blocks_for(task.groups, FlatShape<T>::kGroupsPerThreadBlock, &blocks);
  if (!fits.ok()) return fits;
  if (pack) {
    pack_flat_kernel<T, kBits, kZeroExact, kRotated, kScaled>
        <<<blocks, kFlatThreads, 0, stream>>>(task);
  } else if constexpr (kRotated) {
    unpack_rotated_kernel<T, kBits><<<blocks, kFlatThreads, 0, stream>>>(task);
  } else {
    unpack_flat_kernel<T, kBits, kZeroExact, kScaled><<<blocks, kFlatThreads, 0, stream>>>(task);
  }
  return check_launch("group kernel");
}

}  // namespace backfold::cuda

#endif  // BACKFOLD_GROUP_CUDA_FLAT_CUH_
