// SPDX-License-Identifier: Apache-2.0
//
// What a sample quantizer's kernel is given, and the groups that its threads take.

#ifndef BACKFOLD_SAMPLES_CUDA_TASK_CUH_
#define BACKFOLD_SAMPLES_CUDA_TASK_CUH_

#include <cstdint>

#include "base/cuda/divider.h"
#include "base/cuda/elements.cuh"
#include "base/rng.h"
#include "group/cuda/flat.cuh"
#include "samples/geometry.h"

namespace backfold::cuda {

static_assert(core::kSampleGroup == kGroup);

// The samples of one width.
struct SectionTask {
  unsigned first_slot;
  unsigned samples;
  std::uint32_t* headers;
  std::uint8_t* codes;
  int bits;
};

// A packing or unpacking job, by value to a kernel.
struct SampleTask {
  const void* source;
  void* destination;
  const float* weights;  // null: all 1
  std::uint32_t* slots;
  float* scores;
  float* sums;  // one for each tree of each sample; lies where the codes will
  SectionTask sections[core::kSampleSections];
  unsigned samples;
  unsigned groups;       // of one sample
  int last_count;        // elements of a sample's last group
  unsigned trees;        // of one sample
  unsigned tree_groups;  // of one tree; the last of a sample may have fewer
  unsigned tree_span;    // the power of two that they fit in
  Divider by_groups;
  Divider by_trees;
  Divider by_tree_groups;
  core::MixedKey key;
  bool aligned;  // every sample of the tensor starts on 16 bytes
};

// One group of a sample. `count` is 0 for none.
struct SampleGroup {
  unsigned sample;
  unsigned group;  // of the sample
  int count;       // elements

  __device__ SampleGroup(const SampleTask& task, unsigned in_sample, unsigned in_group)
      : sample(in_sample),
        group(in_group),
        count(group + 1 < task.groups ? core::kSampleGroup : task.last_count) {
    if (sample >= task.samples || group >= task.groups) count = 0;
  }
  // Of its first element; what the last groups of the samples before lack is a 32-bit number.
  __device__ std::int64_t offset(const SampleTask& task) const {
    const unsigned lacking = sample * static_cast<unsigned>(core::kSampleGroup - task.last_count);
    return static_cast<std::int64_t>(sample * task.groups + group) * core::kSampleGroup - lacking;
  }
};

// A vector of a group that is short or not aligned; the group's first element stands for those
// that are missing, so that they change no range.
template <typename T>
__device__ __noinline__ uint4 load_clamped(const T* first, int at, int count) {
  uint4 raw;
  T* elements = reinterpret_cast<T*>(&raw);
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i) elements[i] = first[at + i < count ? at + i : 0];
  return raw;
}

// A lane's part of a group, 16 bytes from each quarter. Zeros if it has no elements.
template <typename T>
__device__ inline void load_group(uint4 (&raw)[4], const T* first, int count, int lane,
                                  bool aligned) {
  constexpr int kV = kVector<T>, kQuarter = core::kSampleGroup / 4;
  if (aligned && count == core::kSampleGroup) {
#pragma unroll
    for (int k = 0; k < 4; ++k)
      raw[k] = *reinterpret_cast<const uint4*>(first + k * kQuarter + lane * kV);
    return;
  }
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const int at = k * kQuarter + lane * kV;
    raw[k] = make_uint4(0, 0, 0, 0);
    if (aligned && at + kV <= count) {
      raw[k] = *reinterpret_cast<const uint4*>(first + at);
    } else if (count > 0) {
      raw[k] = load_clamped(first, at, count);
    }
  }
}

// Lets the stream's next kernel start its blocks as soon as all blocks of this one have begun;
// waits until the kernel before this one is done. Worth 4 us of a packing; nothing before 9.0.
__device__ inline void allow_next_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ inline void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace backfold::cuda

#endif  // BACKFOLD_SAMPLES_CUDA_TASK_CUH_
