// SPDX-License-Identifier: Apache-2.0
//
// Kernels that write and read the codes of samples. Groups lie over lanes as the group quantizer's
// do (group/cuda/flat.cuh); a warp whose groups belong to samples of several widths does them in
// turn.

#ifndef BACKFOLD_SAMPLES_CUDA_CODES_CUH_
#define BACKFOLD_SAMPLES_CUDA_CODES_CUH_

#include "base/widths.h"
#include "samples/cuda/task.cuh"

namespace backfold::cuda {

// Calls work.operator()<bits>() for the width of a section. 16 bits of a 16-bit type are not
// compiled: a valid format has no such samples.
template <typename T, typename Work>
__device__ inline void with_width_of(const SectionTask& section, const Work& work) {
  core::with_width<kSampleWidths>(section.bits, [&]<int kBits>() {
    if constexpr (kBits < 8 * sizeof(T)) work.template operator()<kBits>();
  });
}

// Where a group's header and codes are.
struct GroupAddress {
  int section;
  std::int64_t group;  // of the section

  // What is no slot counts as the last one.
  __device__ GroupAddress(const SampleTask& task, const SampleGroup& group_in, unsigned slot)
      : section(0) {
    slot = slot < task.samples ? slot : task.samples - 1;
#pragma unroll
    for (int i = 1; i < static_cast<int>(core::kSampleSections); ++i)
      section = task.sections[i].first_slot <= slot ? i : section;
    group = static_cast<std::int64_t>(slot - task.sections[section].first_slot) * task.groups +
            group_in.group;
  }
  __device__ std::uint32_t* header(const SampleTask& task) const {
    return task.sections[section].headers + group;
  }
  template <int kBits>
  __device__ std::uint8_t* codes(const SampleTask& task) const {
    return task.sections[section].codes + group * (core::kSampleGroup * kBits / 8);
  }
};

// The number of the group of this thread's lanes, through all samples. Thread blocks take groups
// from the tensor's end, where the scores have just been read and the second-level cache still
// holds the elements.
template <typename T>
__device__ inline unsigned own_number() {
  using Shape = FlatShape<T>;
  return (gridDim.x - 1 - blockIdx.x) * Shape::kGroupsPerThreadBlock + threadIdx.x / Shape::kLanes;
}
template <typename T>
__device__ inline SampleGroup own_group(const SampleTask& task) {
  const unsigned number = own_number<T>(), sample = task.by_groups.quotient(number);
  return {task, sample, number - sample * task.groups};
}

// A group off the fast path as a task of the group quantizer's, by a warp. Lane `leader` has it.
template <typename T, bool kPack>
__device__ inline void special_group(const SampleTask& task, int leader) {
  SampleGroup group = own_group<T>(task);
  group.sample = __shfl_sync(kFullWarp, group.sample, leader);
  group.group = __shfl_sync(kFullWarp, group.group, leader);
  group.count = __shfl_sync(kFullWarp, group.count, leader);
  const GroupAddress address(task, group, task.slots[group.sample]);
  const std::int64_t offset = group.offset(task);
  GroupTask one{};
  one.headers = task.sections[address.section].headers;
  one.codes = task.sections[address.section].codes;
  one.first_group =
      static_cast<std::int64_t>(group.sample) * task.groups + group.group - address.group;
  one.key = task.key;
  one.bits = task.sections[address.section].bits;
  one.group = core::kSampleGroup;
  if constexpr (kPack) {
    pack_special(one, address.group, static_cast<const T*>(task.source) + offset, 1, group.count);
  } else {
    unpack_special(one, address.group, static_cast<T*>(task.destination) + offset, 1, group.count);
  }
}

// Bit l of `special` stands for the group of lane l. Out of line and from scratch, so that nothing
// is kept in registers for it.
template <typename T, bool kPack>
__device__ __noinline__ void special_groups(const SampleTask& task, unsigned special) {
  for (; special != 0; special &= special - 1)
    special_group<T, kPack>(task, __ffs(static_cast<int>(special)) - 1);
}

// Zeros behind the table and behind the headers of each section.
__device__ inline void zero_sample_padding(const SampleTask& task) {
  if (blockIdx.x != 0 || threadIdx.x > core::kSampleSections) return;
  const bool table = threadIdx.x == core::kSampleSections;
  const SectionTask& section = task.sections[table ? 0 : threadIdx.x];
  const std::int64_t words = table ? 2 * static_cast<std::int64_t>(task.samples)
                                   : static_cast<std::int64_t>(section.samples) * task.groups;
  std::uint32_t* const first = table ? task.slots : section.headers;
  for (std::int64_t i = words; i % 4 != 0; ++i) first[i] = 0;
}

// Draws and stores the codes of a lane's elements. Missing ones take the base for a value, whose
// code is 0 whatever its random number.
template <typename T, int kBits, bool kShort>
__device__ inline void pack_lane(const SampleTask& task, const GroupAddress& address, int count,
                                 const Extremes& extremes, const float (&x)[4][kVector<T>]) {
  using Shape = FlatShape<T>;
  constexpr core::Levels kLevels = core::levels_for(kBits, false, false);
  const int lane = threadIdx.x % Shape::kLanes;
  const core::Range range =
      core::round_outward(extremes.low, extremes.high, kLevels, core::kFinite);
  if (lane == 0) *address.header(task) = range.header;
  const std::uint64_t first_block =
      static_cast<std::uint64_t>(own_number<T>()) * (core::kSampleGroup / core::kRandomBlock);
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
      const int k = code % 4, j = 2 * block + code / 4;
      const bool missing = kShort && k * (core::kSampleGroup / 4) + lane * Shape::kV + j >= count;
      const float uniform = core::unit_interval(hash * core::element_multiplier(code));
      codes.add(8 * block + code, magic_draw(missing ? range.base : x[k][j], range.base,
                                             range.inverse, uniform, kLevels.ceiling));
    }
  }
  codes.store(address.codes<kBits>(task), lane);
}

// As flat_pack_blocks(), but that 48 registers are 5 too few for the 16-bit types.
template <typename T>
__host__ __device__ constexpr int sample_pack_blocks() {
  return sizeof(T) == 2 ? 4 : flat_pack_blocks<T>(false);
}

// Mapping    as the group quantizer's flat kernel
// Launch     blocks of 256, one tile of 32 / lanes groups per warp, a grid as large as the work
// Alignment  16-byte loads when the source allows, else by element
// Bytes      source once, headers and codes once
template <typename T>
__global__ void __launch_bounds__(kFlatThreads, sample_pack_blocks<T>())
    pack_samples_kernel(const __grid_constant__ SampleTask task) {
  using Shape = FlatShape<T>;
  const int lane = threadIdx.x % Shape::kLanes;
  const SampleGroup group = own_group<T>(task);
  const bool there = group.count > 0;
  uint4 raw[4];
  load_group<T>(raw, static_cast<const T*>(task.source) + (there ? group.offset(task) : 0),
                group.count, lane, task.aligned);
  wait_for_previous_kernel();  // the source was there before; slots and room for codes were not
  zero_sample_padding(task);
  const GroupAddress address(task, group, there ? task.slots[group.sample] : 0u);
  float x[4][Shape::kV];
#pragma unroll
  for (int k = 0; k < 4; ++k) to_floats<T>(raw[k], x[k]);
  const Extremes extremes = across_lanes<Shape::kLanes>(lane_extremes<T, false>(raw, x));
  const bool plain = there && extremes.plain();
  if (plain) {
    with_width_of<T>(task.sections[address.section], [&]<int kBits>() {
      if (group.count == core::kSampleGroup) {
        pack_lane<T, kBits, false>(task, address, group.count, extremes, x);
      } else {
        pack_lane<T, kBits, true>(task, address, group.count, extremes, x);
      }
    });
  }
  const unsigned special = __ballot_sync(kFullWarp, lane == 0 && there && !plain);
  if (special != 0) special_groups<T, true>(task, special);
}

// Decodes a lane's part of a group. False, and nothing done, for a group off the fast path.
template <typename T, int kBits>
__device__ inline bool unpack_lane(const SampleTask& task, const GroupAddress& address, int lane,
                                   uint4 (&raw)[4]) {
  using Shape = FlatShape<T>;
  constexpr core::Levels kLevels = core::levels_for(kBits, false, false);
  LaneCodes<kBits, Shape::kBlocks> codes;
  codes.load(address.codes<kBits>(task), lane);
  const std::uint32_t header = *address.header(task);
  const core::Grid grid = core::grid_in(header, kLevels);
  if (!is_plain(header, grid, kLevels)) return false;
  const Decoder<kBits, Shape::kBlocks> decoder(grid);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    float x[Shape::kV];
#pragma unroll
    for (int j = 0; j < Shape::kV; ++j) x[j] = decoder.template value<T, false>(codes, 4 * j + k);
    raw[k] = from_floats<T>(x);
  }
  return true;
}

// Mapping    as packing
// Launch     as packing
// Alignment  16-byte stores when the destination allows, else by element
// Bytes      headers and codes once, destination once
template <typename T>
__global__ void __launch_bounds__(kFlatThreads, flat_unpack_blocks(false))
    unpack_samples_kernel(const __grid_constant__ SampleTask task) {
  using Shape = FlatShape<T>;
  const int lane = threadIdx.x % Shape::kLanes;
  const SampleGroup group = own_group<T>(task);
  const bool there = group.count > 0;
  bool plain = false;
  if (there) {
    const GroupAddress address(task, group, task.slots[group.sample]);
    uint4 raw[4];
    with_width_of<T>(task.sections[address.section],
                     [&]<int kBits>() { plain = unpack_lane<T, kBits>(task, address, lane, raw); });
    T* const first = static_cast<T*>(task.destination) + group.offset(task);
    const auto at = [&](int k) { return k * (core::kSampleGroup / 4) + lane * Shape::kV; };
    if (plain && group.count == core::kSampleGroup) {
      store_vectors<4, T>(
          raw, [&](int k) { return first + at(k); }, task.aligned, Shape::kV);
    } else if (plain) {
#pragma unroll
      for (int k = 0; k < 4; ++k) store_elements<T>(first + at(k), raw[k], group.count - at(k));
    }
  }
  const unsigned special = __ballot_sync(kFullWarp, lane == 0 && there && !plain);
  if (special != 0) special_groups<T, false>(task, special);
}

}  // namespace backfold::cuda

#endif  // BACKFOLD_SAMPLES_CUDA_CODES_CUH_
