// SPDX-License-Identifier: Apache-2.0
//
// Which sample gets which slot: scores of samples, and their ranks.

#ifndef BACKFOLD_SAMPLES_CUDA_RANK_CUH_
#define BACKFOLD_SAMPLES_CUDA_RANK_CUH_

#include "samples/cuda/task.cuh"
#include "samples/score.h"

namespace backfold::cuda {

// Groups whose elements a thread block of the first kernel has room for: 32 KiB of them.
inline constexpr int kScoreThreads = kFlatThreads;
inline constexpr int kInFlight = 2;  // groups of one lane
template <typename T>
inline constexpr int kScoreGroups = kInFlight* FlatShape<T>::kGroupsPerThreadBlock;

inline constexpr int kRankThreads = 1024;
inline constexpr int kRankSamples = 128;  // that a thread block ranks

// The sum of the lanes' terms as core::tree_sum() takes it, in every lane.
__device__ inline float warp_tree_sum(float term) {
#pragma unroll
  for (int distance = 1; distance < core::kScoreLanes; distance *= 2)
    term += __shfl_xor_sync(kFullWarp, term, distance);
  return term;
}

// Mapping    trees of up to 32 groups of one sample, as many to a thread block as it has room for;
//            lanes have groups as the group quantizer's do, two of them in flight
// Launch     blocks of 256, a grid as large as the work
// Alignment  16-byte loads when the source allows, else by element
// Bytes      source once, 4 bytes for each tree
template <typename T>
__global__ void __launch_bounds__(kScoreThreads, 4)
    sum_trees_kernel(const __grid_constant__ SampleTask task) {
  using Shape = FlatShape<T>;
  __shared__ float terms[kScoreGroups<T>];
  allow_next_kernel();
  const unsigned lane = threadIdx.x % Shape::kLanes;
  const unsigned trees = kScoreGroups<T> / task.tree_groups;  // of this block
  const unsigned first_tree = blockIdx.x * trees;
  const unsigned all_trees = task.samples * task.trees;
  const T* source = static_cast<const T*>(task.source);

  uint4 raw[kInFlight][4];
  bool there[kInFlight];
  const auto local = [](int i) {
    return static_cast<unsigned>(i * Shape::kGroupsPerThreadBlock) + threadIdx.x / Shape::kLanes;
  };
#pragma unroll
  for (int i = 0; i < kInFlight; ++i) {
    const unsigned tree = first_tree + task.by_tree_groups.quotient(local(i));
    const bool mine = local(i) < trees * task.tree_groups && tree < all_trees;
    const SampleGroup group(task, mine ? task.by_trees.quotient(tree) : task.samples,
                            task.by_trees.remainder(tree) * core::kScoreLanes +
                                task.by_tree_groups.remainder(local(i)));
    there[i] = group.count > 0;
    load_group<T>(raw[i], source + (there[i] ? group.offset(task) : 0), group.count,
                  static_cast<int>(lane), task.aligned);
  }
#pragma unroll
  for (int i = 0; i < kInFlight; ++i) {
    float x[4][Shape::kV];
    if constexpr (sizeof(T) != 2) {
#pragma unroll
      for (int k = 0; k < 4; ++k) to_floats<T>(raw[i][k], x[k]);
    }
    const Extremes extremes = across_lanes<Shape::kLanes>(lane_extremes<T, false>(raw[i], x));
    if (lane == 0)
      terms[local(i)] = there[i] ? core::squared_range(extremes.low, extremes.high) : 0.0f;
  }
  __syncthreads();

  // Lanes that a tree leaves over take other trees: adding zeros would change no sum.
  const unsigned at_once = kScoreThreads / task.tree_span, in_tree = threadIdx.x % task.tree_span;
  for (unsigned base = 0; base < trees; base += at_once) {
    const unsigned tree = base + threadIdx.x / task.tree_span;
    const bool mine = tree < trees && in_tree < task.tree_groups;
    float term = mine ? terms[tree * task.tree_groups + in_tree] : 0.0f;
    for (unsigned distance = 1; distance < task.tree_span; distance *= 2)
      term += __shfl_xor_sync(kFullWarp, term, static_cast<int>(distance));
    if (mine && in_tree == 0 && first_tree + tree < all_trees) task.sums[first_tree + tree] = term;
  }
}

// The scores of kCount samples from `first` on, by a warp. Sums are loaded in batches: one by one,
// 196 trees of a sample would wait seven times for memory.
template <int kCount>
__device__ inline void scores_of(const SampleTask& task, unsigned first, float (&scores)[kCount]) {
  constexpr unsigned kBatch = 4;
#pragma unroll
  for (int i = 0; i < kCount; ++i) scores[i] = 0.0f;
  for (unsigned base = threadIdx.x % 32; base < task.trees; base += kBatch * core::kScoreLanes) {
    float sums[kBatch][kCount];
#pragma unroll
    for (unsigned k = 0; k < kBatch; ++k) {
      const unsigned tree = base + k * core::kScoreLanes;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const unsigned sample = first + static_cast<unsigned>(i);
        const bool there = tree < task.trees && sample < task.samples;
        sums[k][i] = there ? task.sums[sample * task.trees + tree] : 0.0f;
      }
    }
#pragma unroll
    for (unsigned k = 0; k < kBatch; ++k) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) scores[i] += sums[k][i];
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) scores[i] = warp_tree_sum(scores[i]);
}

// What slots rise with, ties included: a sample's key, then its index from the last down.
__device__ inline std::uint64_t order_of(const SampleTask& task, unsigned sample, float score) {
  const float weight = task.weights == nullptr ? 1.0f : task.weights[sample];
  return static_cast<std::uint64_t>(core::rank_key(score, weight)) << 32 | ~sample;
}

// Sorts the 128 numbers of `own`, by a thread block; place[i] is where own[i] went.
__device__ inline void sort_own(const std::uint64_t* own, std::uint64_t* sorted, unsigned* place) {
  constexpr unsigned kLanes = kRankThreads / kRankSamples;
  const unsigned mine = threadIdx.x / kLanes;
  unsigned before = 0;
  for (unsigned i = threadIdx.x % kLanes; i < kRankSamples; i += kLanes)
    before += own[i] < own[mine] || (own[i] == own[mine] && i < mine) ? 1u : 0u;
#pragma unroll
  for (unsigned distance = 1; distance < kLanes; distance *= 2)
    before += __shfl_xor_sync(kFullWarp, before, static_cast<int>(distance));
  if (threadIdx.x % kLanes != 0) return;
  sorted[before] = own[mine];
  place[mine] = before;
}

// Mapping    a thread block sorts the 128 samples that it ranks, finds the place of every sample
//            between them, and counts: 20 us for 16,384 samples, where comparing all pairs took
//            100. A thread has one sample of a round, or a warp has 8 of several trees
// Launch     blocks of 1024, one for 128 samples
// Alignment  by word
// Bytes      4 for each tree, per thread block; 8 for each sample
static __global__ void __launch_bounds__(kRankThreads, 1)
    rank_samples_kernel(const __grid_constant__ SampleTask task) {
  constexpr unsigned kAtOnce = 8;  // one by one, each sample would wait for memory
  constexpr std::uint64_t kNone = ~std::uint64_t{0};
  __shared__ std::uint64_t own[kRankSamples], sorted[kRankSamples];
  __shared__ unsigned place[kRankSamples], below[kRankSamples];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned first = blockIdx.x * kRankSamples;
  if (threadIdx.x < kRankSamples) own[threadIdx.x] = kNone, below[threadIdx.x] = 0;
  allow_next_kernel();
  wait_for_previous_kernel();
  __syncthreads();

  // The round of the own samples comes first.
  const bool alone = task.trees == 1;
  const unsigned size = alone ? kRankThreads : kRankThreads / 32 * kAtOnce;
  const unsigned rounds = (task.samples + size - 1) / size, own_round = first / size;
  for (unsigned turn = 0; turn < rounds; ++turn) {
    const unsigned round = own_round + turn < rounds ? own_round + turn : own_round + turn - rounds;
    const unsigned sample = round * size + (alone ? threadIdx.x : warp * kAtOnce + lane);
    const bool there = (alone || lane < kAtOnce) && sample < task.samples;
    float score = 0.0f;
    if (alone) {
      if (there) score = task.sums[sample];
    } else {
      float scores[kAtOnce];
      scores_of(task, round * size + warp * kAtOnce, scores);
#pragma unroll
      for (unsigned i = 0; i < kAtOnce; ++i) score = lane == i ? scores[i] : score;
    }
    const std::uint64_t order = there ? order_of(task, sample, score) : kNone;
    if (turn == 0) {
      if (there && sample / kRankSamples == blockIdx.x) {
        own[sample - first] = order;
        task.scores[sample] = score;
      }
      __syncthreads();
      sort_own(own, sorted, place);
      __syncthreads();
    }
    if (!there) continue;
    unsigned after = 0;  // the first of the sorted that comes after this sample
#pragma unroll
    for (unsigned step = kRankSamples / 2; step > 0; step /= 2)
      after += sorted[after + step - 1] <= order ? step : 0u;
    if (sorted[after] > order) atomicAdd(below + after, 1u);
  }
  __syncthreads();

  if (threadIdx.x >= kRankSamples || first + threadIdx.x >= task.samples) return;
  const unsigned mine = place[threadIdx.x];
  unsigned slot = 0;
#pragma unroll 16
  for (unsigned i = 0; i < kRankSamples; ++i) slot += i <= mine ? below[i] : 0u;
  task.slots[first + threadIdx.x] = slot;
}

}  // namespace backfold::cuda

#endif  // BACKFOLD_SAMPLES_CUDA_RANK_CUH_
