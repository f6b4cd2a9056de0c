// SPDX-License-Identifier: Apache-2.0

#include "ranged/cuda/ranged.h"

#include "base/cuda/code_pieces.cuh"
#include "base/cuda/elements.cuh"
#include "base/cuda/launch.h"
#include "base/widths.h"
#include "ranged/arithmetic.h"
#include "ranged/cuda/shape.cuh"

namespace backfold::cuda {
namespace {

using core::Grid;
using core::Levels;

constexpr int kThreads = 256;
constexpr int kSteps = 4;   // vectors of one lane that are in flight
constexpr int kRounds = 4;  // times in a tile
// Threads that a large GPU holds, and how many vectors make one of them worth its ranges.
constexpr std::int64_t kMostThreads = 1 << 18;
constexpr std::int64_t kLeastVectors = 4;

template <typename T>
constexpr int kTile = kRounds* kSteps * 32 * kVector<T>;  // elements of one warp

__device__ std::int64_t thread_index() {
  return static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
}

__device__ inline int clamped(std::int64_t left, int most) {
  return left < 0 ? 0 : left < most ? static_cast<int>(left) : most;
}

// Low, and step or its inverse, of each element of a vector.
template <int kCount>
struct VectorGrids {
  float low[kCount];
  float scale[kCount];

  __device__ void put(int j, float low_j, float scale_j) { low[j] = low_j, scale[j] = scale_j; }
};

template <int kBits>
__device__ Grid grid_of_channel(const float* ranges, std::int64_t channel) {
  return core::ranged_grid(ranges[2 * channel], ranges[2 * channel + 1],
                           core::ranged_levels(kBits));
}

template <int kBits, int kCount>
__device__ void grids_for_packing(const Shape& shape, const float* ranges, std::int64_t first,
                                  VectorGrids<kCount>* grids) {
  std::int64_t last = -1;
  walk<kCount>(shape, first, [&](int j, std::int64_t channel) {
    if (channel == last) return grids->put(j, grids->low[j - 1], grids->scale[j - 1]);
    const Grid grid = grid_of_channel<kBits>(ranges, channel);
    grids->put(j, grid.base, core::inverse_of(grid.step));
    last = channel;
  });
}

// Gives the channels of a vector's elements that are not finite their NaN. Threads may write the
// same one; the packing kernels do not read headers.
template <typename T>
__device__ __noinline__ void mark(const Shape& shape, uint4 raw, std::int64_t first, int there,
                                  Grid* headers) {
  float values[kVector<T>];
  to_floats<T>(raw, values);
  walk<kVector<T>>(shape, first, [&](int j, std::int64_t channel) {
    if (j < there && !core::is_finite(values[j]))
      headers[channel].step = core::float_of(0x7fc0'0000u);
  });
}

// Random numbers of the vectors of one lane.
template <int kCount>
struct LaneUniforms {
  static constexpr int kShare = core::kRandomBlock / kCount;  // vectors of one hash
  core::MixedKey key;
  std::uint32_t multipliers[kCount];

  __device__ LaneUniforms(core::MixedKey key_in, int lane) : key(key_in) {
#pragma unroll
    for (int k = 0; k < kShare; ++k)
#pragma unroll
      for (int j = 0; j < kCount; ++j)
        if (k == 0 || lane % kShare == k) multipliers[j] = core::element_multiplier(kCount * k + j);
  }

  __device__ std::uint32_t hash_of(std::int64_t vector) const {
    const auto block = static_cast<std::uint64_t>(vector) / kShare;
    return core::block_hash(core::block_offset(key, block), key.second,
                            static_cast<std::uint32_t>(block));
  }
  __device__ float at(int j, std::uint32_t hash) const {
    return core::unit_interval(hash * multipliers[j]);
  }
};

// Draws the codes of the first `there` elements of a vector, 0 for the others. Returns whether
// these are finite.
template <typename T, int kBits>
__device__ inline bool draw_vector(const uint4& raw, std::int64_t vector, int there,
                                   const VectorGrids<kVector<T>>& grids,
                                   const LaneUniforms<kVector<T>>& uniforms,
                                   Piece<kBits, kVector<T>>* piece) {
  constexpr int E = kVector<T>;
  constexpr float kCeiling = core::levels_for(kBits, false, false).ceiling;
  float values[E];
  to_floats<T>(raw, values);
  const std::uint32_t hash = uniforms.hash_of(vector);
  float witness = 0.0f;  // NaN once a value was not finite
  piece->start_with_magic();
#pragma unroll
  for (int j = 0; j < E; ++j) {
    witness = __fmaf_rn(values[j], 0.0f, witness);
    const std::uint32_t code = magic_draw(fmaxf(values[j], grids.low[j]), grids.low[j],
                                          grids.scale[j], uniforms.at(j, hash), kCeiling);
    piece->add(j, j < there ? code : kMagic);
  }
  return witness == witness;
}

// A payload's parts, and the vectors that its codes have room for.
struct Packed {
  Grid* headers;
  std::uint8_t* codes;
  std::int64_t vectors;
};

// Mapping    one channel per thread, and one more to pad
// Launch     blocks of 256, a grid as large as the work
// Alignment  that of the ranges
// Bytes      ranges once, headers once
template <int kBits>
__global__ void header_kernel(const float* ranges, std::int64_t channels, std::int64_t padded,
                              Grid* headers) {
  const std::int64_t channel = thread_index();
  if (channel >= padded) return;
  headers[channel] =
      channel < channels ? grid_of_channel<kBits>(ranges, channel) : Grid{0.0f, 0.0f};
}

// Mapping    a lane turns 16 bytes of elements into their codes, 16 times, 4 in flight; a load of a
//            warp covers 512 contiguous bytes. Tiles over a run's end look a range up per element
// Launch     blocks of 256, a grid as large as the work
// Alignment  16-byte loads when the source allows and in whole tiles, else by element
// Bytes      source once, codes once, padding included
template <typename T, int kBits>
__global__ void __launch_bounds__(kThreads)
    pack_tiles(const __grid_constant__ Shape shape, const T* __restrict__ source,
               const float* __restrict__ ranges, const core::MixedKey key, const bool aligned,
               const __grid_constant__ Packed packed) {
  constexpr int E = kVector<T>;
  const int lane = threadIdx.x % 32;
  const std::int64_t start = thread_index() / 32 * (32 * kSteps * kRounds);
  if (start >= packed.vectors) return;
  const Position at = position_of(shape, start * E);
  const LaneUniforms<E> uniforms(key, lane);
  VectorGrids<E> grids;
  Piece<kBits, E> piece;
  uint4 raw[kSteps];

  if (aligned && start * E + kTile<T> <= shape.count && at.left >= kTile<T>) {
    const Grid grid = grid_of_channel<kBits>(ranges, at.channel);
    const float inverse = core::inverse_of(grid.step);
#pragma unroll
    for (int j = 0; j < E; ++j) grids.put(j, grid.base, inverse);
    bool finite = true;
    for (int round = 0; round < kRounds; ++round) {
      const std::int64_t first = start + round * kSteps * 32 + lane;
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        raw[step] = reinterpret_cast<const uint4*>(source)[first + step * 32];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        finite &= draw_vector<T, kBits>(raw[step], first + step * 32, E, grids, uniforms, &piece);
        piece.store(packed.codes, first + step * 32, true);
      }
    }
    if (!finite) packed.headers[at.channel].step = core::float_of(0x7fc0'0000u);
    return;
  }
  for (int step = 0; step < kSteps * kRounds; ++step) {
    const std::int64_t vector = start + step * 32 + lane;
    const int there = clamped(shape.count - vector * E, E);
    raw[0] = load_elements<T>(source + vector * E, there);
    grids_for_packing<kBits>(shape, ranges, vector * E, &grids);
    if (!draw_vector<T, kBits>(raw[0], vector, there, grids, uniforms, &piece))
      mark<T>(shape, raw[0], vector * E, there, packed.headers);
    piece.store(packed.codes, vector, vector < packed.vectors);
  }
}

// Mapping    a thread packs every `period`-th vector, 4 in flight, with ranges in registers
// Launch     blocks of 256 for `period` threads
// Alignment  the source starts on 16 bytes
// Bytes      source once, codes once, padding included
template <typename T, int kBits>
__global__ void __launch_bounds__(kThreads)
    pack_rows(const __grid_constant__ Shape shape, const T* __restrict__ source,
              const float* __restrict__ ranges, const core::MixedKey key, const std::int64_t period,
              const __grid_constant__ Packed packed) {
  constexpr int E = kVector<T>;
  const int lane = threadIdx.x % 32;
  std::int64_t start = thread_index() - lane;  // of the warp
  if (start >= period) return;
  const LaneUniforms<E> uniforms(key, lane);
  VectorGrids<E> grids;
  Piece<kBits, E> piece;
  grids_for_packing<kBits>(shape, ranges, (start + lane) * E, &grids);

  for (; (start + (kSteps - 1) * period + 32) * E <= shape.count; start += kSteps * period) {
    uint4 raw[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      raw[step] = reinterpret_cast<const uint4*>(source)[start + step * period + lane];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const std::int64_t vector = start + step * period + lane;
      if (!draw_vector<T, kBits>(raw[step], vector, E, grids, uniforms, &piece))
        mark<T>(shape, raw[step], vector * E, E, packed.headers);
      piece.store(packed.codes, vector, true);
    }
  }
  for (; start < packed.vectors; start += period) {
    const std::int64_t vector = start + lane;
    const int there = clamped(shape.count - vector * E, E);
    const uint4 raw = load_elements<T>(source + vector * E, there);
    if (!draw_vector<T, kBits>(raw, vector, there, grids, uniforms, &piece))
      mark<T>(shape, raw, vector * E, there, packed.headers);
    piece.store(packed.codes, vector, vector < packed.vectors);
  }
}

template <typename T, int kBits>
__device__ inline uint4 decode_vector(const Piece<kBits, kVector<T>>& piece,
                                      const VectorGrids<kVector<T>>& grids) {
  float values[kVector<T>];
#pragma unroll
  for (int j = 0; j < kVector<T>; ++j)
    values[j] = __fmaf_rn(piece.number(j), grids.scale[j], grids.low[j]);
  return from_floats<T>(values);
}

// One vector, with whatever its channels' headers say.
template <typename T, int kBits>
__device__ __noinline__ void unpack_vector(const Shape& shape, const Packed& packed,
                                           std::int64_t vector, T* destination) {
  constexpr int E = kVector<T>;
  const int there = clamped(shape.count - vector * E, E);
  if (there == 0) return;
  Piece<kBits, E> piece;
  piece.load(packed.codes, vector);
  walk<E>(shape, vector * E, [&](int j, std::int64_t channel) {
    if (j >= there) return;
    const Grid grid = packed.headers[channel];
    destination[vector * E + j] = core::decodes(grid, core::ranged_levels(kBits))
                                      ? core::from_float<T>(core::value_of(piece.get(j), grid))
                                      : core::nan_element<T>();
  });
}

// Mapping    the inverse of pack_tiles
// Launch     blocks of 256, a grid as large as the work
// Alignment  16-byte stores when the destination allows and in whole tiles, else by element
// Bytes      codes once, elements once
template <typename T, int kBits>
__global__ void __launch_bounds__(kThreads)
    unpack_tiles(const __grid_constant__ Shape shape, const __grid_constant__ Packed packed,
                 const bool aligned, T* __restrict__ destination) {
  constexpr int E = kVector<T>;
  const int lane = threadIdx.x % 32;
  const std::int64_t start = thread_index() / 32 * (32 * kSteps * kRounds);
  if (start * E >= shape.count) return;
  const Position at = position_of(shape, start * E);
  const Grid grid = packed.headers[at.channel];
  if (aligned && start * E + kTile<T> <= shape.count && at.left >= kTile<T> &&
      core::decodes(grid, core::ranged_levels(kBits))) {
    VectorGrids<E> grids;
#pragma unroll
    for (int j = 0; j < E; ++j) grids.put(j, grid.base, grid.step);
    for (int round = 0; round < kRounds; ++round) {
      const std::int64_t first = start + round * kSteps * 32 + lane;
      Piece<kBits, E> pieces[kSteps];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) pieces[step].load(packed.codes, first + step * 32);
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        __stcs(reinterpret_cast<uint4*>(destination) + first + step * 32,
               decode_vector<T, kBits>(pieces[step], grids));
    }
    return;
  }
  for (int step = 0; step < kSteps * kRounds; ++step)
    unpack_vector<T, kBits>(shape, packed, start + step * 32 + lane, destination);
}

// Mapping    the inverse of pack_rows
// Launch     blocks of 256 for `period` threads
// Alignment  the destination starts on 16 bytes
// Bytes      codes once, elements once
template <typename T, int kBits>
__global__ void __launch_bounds__(kThreads)
    unpack_rows(const __grid_constant__ Shape shape, const __grid_constant__ Packed packed,
                const std::int64_t period, T* __restrict__ destination) {
  constexpr int E = kVector<T>;
  std::int64_t vector = thread_index();
  if (vector >= period) return;
  VectorGrids<E> grids;
  bool decodable = true;
  walk<E>(shape, vector * E, [&](int j, std::int64_t channel) {
    const Grid grid = packed.headers[channel];
    decodable &= core::decodes(grid, core::ranged_levels(kBits));
    grids.put(j, grid.base, grid.step);
  });
  if (decodable) {
    for (; (vector + (kSteps - 1) * period + 1) * E <= shape.count; vector += kSteps * period) {
      Piece<kBits, E> pieces[kSteps];
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        pieces[step].load(packed.codes, vector + step * period);
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        __stcs(reinterpret_cast<uint4*>(destination) + vector + step * period,
               decode_vector<T, kBits>(pieces[step], grids));
    }
  }
  for (; vector * E < shape.count; vector += period)
    unpack_vector<T, kBits>(shape, packed, vector, destination);
}

// Calls work.operator()<T, bits>().
template <typename Work>
void with_types(const RangedFormat& format, const Work& work) {
  core::with_element(format.type, [&]<typename T>() {
    core::with_width<core::kRangedWidths>(
        format.bits, [&]<int kBits>() { work.template operator()<T, kBits>(); });
  });
}

Packed parts_of(const RangedFormat& format, const void* payload, int per_vector) {
  const core::RangedGeometry geometry(format);
  std::uint8_t* const bytes = static_cast<std::uint8_t*>(const_cast<void*>(payload));
  return {reinterpret_cast<Grid*>(bytes), bytes + geometry.header_bytes,
          static_cast<std::int64_t>(geometry.code_bytes) * 8 / format.bits / per_vector};
}

}  // namespace

Status pack_ranged(const RangedFormat& format, const void* source, const float* ranges,
                   core::MixedKey key, void* payload, void* stream) {
  if (format.channels == 0) return {};
  const auto queue = static_cast<cudaStream_t>(stream);
  const std::int64_t headers = (format.channels + 1) / 2 * 2;
  Status status;
  with_types(format, [&]<typename T, int kBits>() {
    const Shape shape(format);
    const Packed packed = parts_of(format, payload, kVector<T>);
    const T* const elements = static_cast<const T*>(source);
    unsigned blocks = 0;
    status = blocks_for(headers, kThreads, &blocks);
    if (!status.ok()) return;
    header_kernel<kBits>
        <<<blocks, kThreads, 0, queue>>>(ranges, format.channels, headers, packed.headers);
    status = check_launch("ranged headers");
    if (!status.ok() || shape.count == 0) return;
    const bool aligned = is_aligned(source, 16);
    const std::int64_t period =
        aligned ? period_of(shape, kVector<T>, kTile<T>, kMostThreads, kLeastVectors) : 0;
    status = blocks_for(period != 0 ? period : packed.vectors,
                        period != 0 ? kThreads : kThreads * kSteps * kRounds, &blocks);
    if (!status.ok()) return;
    if (period != 0)
      pack_rows<T, kBits>
          <<<blocks, kThreads, 0, queue>>>(shape, elements, ranges, key, period, packed);
    else
      pack_tiles<T, kBits>
          <<<blocks, kThreads, 0, queue>>>(shape, elements, ranges, key, aligned, packed);
    status = check_launch("pack_ranged");
  });
  return status;
}

Status unpack_ranged(const RangedFormat& format, const void* payload, void* destination,
                     void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  Status status;
  with_types(format, [&]<typename T, int kBits>() {
    const Shape shape(format);
    if (shape.count == 0) return;
    const Packed packed = parts_of(format, payload, kVector<T>);
    T* const elements = static_cast<T*>(destination);
    const bool aligned = is_aligned(destination, 16);
    const std::int64_t period =
        aligned ? period_of(shape, kVector<T>, kTile<T>, kMostThreads, kLeastVectors) : 0;
    unsigned blocks = 0;
    status = blocks_for(period != 0 ? period : packed.vectors,
                        period != 0 ? kThreads : kThreads * kSteps * kRounds, &blocks);
    if (!status.ok()) return;
    if (period != 0)
      unpack_rows<T, kBits><<<blocks, kThreads, 0, queue>>>(shape, packed, period, elements);
    else
      unpack_tiles<T, kBits><<<blocks, kThreads, 0, queue>>>(shape, packed, aligned, elements);
    status = check_launch("unpack_ranged");
  });
  return status;
}

}  // namespace backfold::cuda
