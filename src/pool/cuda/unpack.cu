// SPDX-License-Identifier: Apache-2.0

#include "pool/cuda/codes.cuh"
#include "pool/cuda/launch.h"
#include "pool/cuda/part.cuh"
#include "pool/cuda/stage.cuh"
#include "pool/cuda/strip.cuh"

namespace backfold::cuda {
namespace {

// How the codes of a band are read.
struct BandGrid {
  core::BandForm form = core::BandForm::kGrid;
  core::Grid grid{0.0f, 0.0f};
};

// What a piece decodes to off the fast path. Out of line, to keep it out of the kernel's way.
template <typename T>
__device__ __noinline__ void put_unusual(T* to, const PoolTask& task, int stride, int elements,
                                         std::uint64_t codes, BandGrid band, float average) {
  const float base = core::block_base(average, band.grid.base);
  for (int j = 0; j < elements; ++j) {
    const auto code = static_cast<std::uint32_t>(codes >> j * task.bits) & ((1u << task.bits) - 1u);
    T element = core::nan_element<T>();
    if (band.form == core::BandForm::kFullRange) {
      element = core::from_float<T>(core::full_range_value(code, task.levels));
    } else if (band.form == core::BandForm::kGrid && core::is_finite(average)) {
      element = core::from_float<T>(
          task.bits == 0 ? average : core::value_of(code, core::Grid{base, band.grid.step}));
    }
    to[j * stride] = element;
  }
}

// The numbers that the codes of a piece stand for.
template <int kPiece>
__device__ inline void decode(const PoolTask& task, std::uint64_t codes, float base, float step,
                              float* numbers) {
  const std::uint32_t mask = (1u << task.bits) - 1u;
#pragma unroll
  for (int j = 0; j < kPiece; ++j) {
    const auto quad = static_cast<std::uint32_t>(j < 4 ? codes : codes >> 4 * task.bits);
    const std::uint32_t code = quad >> j % 4 * task.bits & mask;
    // Under the bits of 2^23 a code is a number without a conversion.
    numbers[j] = core::fused(magic_number(code | kMagic), step, base);
  }
}

// Writes the elements of a part to shared memory.
template <typename T, int kRoom, Staging kStaging, bool kResidual>
__device__ inline void unpack_part(const PoolTask& task, const Part& part, int run_length,
                                   const BandGrid& band, const std::uint32_t* words, T* elements) {
  constexpr int kPiece = piece_of(kRoom);
  const float average = core::bfloat_to_float(task.averages[part.average(task)]);
  const float base = kResidual ? core::block_base(average, band.grid.base) : average;
  const bool plain = band.form == core::BandForm::kGrid &&
                     core::is_moderate_block(base, band.grid.step, task.levels);
  const int stride = is_flat(kStaging) ? 1 : task.run;
  T* to = elements + part.staged;
#pragma unroll 1
  for (int r = 0; r < part.strips; ++r, to += task.staged_row) {
    std::uint64_t codes[kRoom / kPiece] = {};
    if constexpr (kResidual) {
#pragma unroll
      for (int piece = 0; piece < kRoom; piece += kPiece) {
        const int left = min(kPiece, part.width - piece);
        const int at = (part.position + r * run_length + piece) * task.bits;
        if (left > 0)
          codes[piece / kPiece] = task.bytewise ? get_bytes<kPiece>(words, at, task.bits)
                                                : get_codes(words, at, left * task.bits);
      }
    }
    if (plain) {
      float numbers[kRoom];
#pragma unroll
      for (int piece = 0; piece < kRoom; piece += kPiece) {
        if constexpr (kResidual) {
          decode<kPiece>(task, codes[piece / kPiece], base, band.grid.step, numbers + piece);
        } else {
#pragma unroll
          for (int j = 0; j < kPiece; ++j) numbers[piece + j] = base;
        }
      }
      Neighbours<T, kRoom> strip;
      strip.from_numbers(numbers);
      store_strip<kRoom, kStaging>(to, task, part.width, strip);
    } else {
#pragma unroll 1
      for (int piece = 0; piece < kRoom; piece += kPiece)
        put_unusual(to + piece * stride, task, stride, min(kPiece, part.width - piece),
                    codes[piece / kPiece], band, average);
    }
  }
}

// Mapping    as packing
// Launch     as packing
// Alignment  as packing
// Bytes      averages, headers and codes once, destination once
template <typename T, int kRoom, Staging kStaging, bool kResidual>
__global__ void __launch_bounds__(128, 8)
    unpack_pool_kernel(const __grid_constant__ PoolTask task) {
  extern __shared__ uint4 shared[];
  const int warp = threadIdx.x / 32;
  char* const room = reinterpret_cast<char*>(shared) + warp * task.warp_bytes;
  const int tile = static_cast<int>(blockIdx.x * (blockDim.x / 32)) + warp;
  const int first_band = tile << (5 - task.lanes_log);
  if (first_band >= task.bands) return;
  const LanePlace<kStaging> lane(task, first_band);
  const Stage<T, kStaging> stage(task, lane, room + task.stage_offset);
  BandGrid band;
  const std::uint32_t* codes = nullptr;
  if constexpr (kResidual) {
    const WordPlace words(task, lane, room);
    codes = words.shared + words.own;
    for_vectors(
        words.memory, words.count,
        [&](int at) { __pipeline_memcpy_async(words.shared + at, words.memory + at, 16); },
        [&](int at) { __pipeline_memcpy_async(words.shared + at, words.memory + at, 4); });
    __pipeline_commit();
    const std::uint32_t header = lane.there ? task.headers[lane.band.index] : 0;
    band.form = core::form_of(header, task.levels);
    band.grid = core::grid_in(header, task.levels);
    stage.arrive();
  }
  const Part own = place_part<kStaging>(task, lane, lane.own_lane);
  for_parts<kStaging>(task, lane, own, [&](const Part& part, int) {
    if (part.strips != 0)
      unpack_part<T, kRoom, kStaging, kResidual>(task, part, lane.band.run_length, band, codes,
                                                 stage.shared());
  });
  stage.template finish<kRoom>(own);
}

}  // namespace

Status launch_pool_unpack(const PoolTask& task, Staging staging, cudaStream_t stream) {
  return launch_pool(
      task, staging,
      [&]<typename T, int kRoom, Staging kStaging, bool kResidual>(const PoolGrid& grid) {
        unpack_pool_kernel<T, kRoom, kStaging, kResidual>
            <<<grid.blocks, grid.threads, grid.shared_bytes, stream>>>(task);
      });
}

}  // namespace backfold::cuda
