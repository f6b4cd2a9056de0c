// SPDX-License-Identifier: Apache-2.0
//
// The sample quantizer's way to its kernels: sums of squared ranges, ranks, codes.

#include "samples/cuda/samples.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cinttypes>
#include <limits>

#include "base/convert.h"
#include "samples/cuda/codes.cuh"
#include "samples/cuda/rank.cuh"

namespace backfold::cuda {
namespace {

// Threads number groups in 32 bits.
Status check_groups(const SampleFormat& format, const core::SampleGeometry& geometry) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (geometry.groups <= kMost / std::max<std::int64_t>(1, format.samples)) return {};
  return Status::error(StatusCode::kInvalidArgument,
                       "samples must have at most %" PRId64
                       " groups of 128 in all on a GPU, got %" PRId64 " of %" PRId64,
                       kMost, format.samples, geometry.groups);
}

SampleTask task_of(const SampleFormat& format, const core::SampleGeometry& geometry,
                   const void* tensor, const void* payload) {
  auto* const bytes = static_cast<std::uint8_t*>(const_cast<void*>(payload));
  const std::int64_t sample_bytes =
      format.per_sample * static_cast<std::int64_t>(size_of(format.type));
  SampleTask task{};
  task.slots = reinterpret_cast<std::uint32_t*>(bytes);
  task.scores = reinterpret_cast<float*>(bytes + geometry.scores);
  task.sums = reinterpret_cast<float*>(bytes + geometry.body);
  for (std::size_t i = 0; i < core::kSampleSections; ++i) {
    const core::SampleSection& section = geometry.sections[i];
    task.sections[i] = {static_cast<unsigned>(section.first_slot),
                        static_cast<unsigned>(section.samples),
                        reinterpret_cast<std::uint32_t*>(bytes + section.headers),
                        bytes + section.codes, section.bits};
  }
  task.samples = static_cast<unsigned>(format.samples);
  task.groups = static_cast<unsigned>(geometry.groups);
  task.last_count =
      static_cast<int>(format.per_sample - (geometry.groups - 1) * core::kSampleGroup);
  task.trees = (task.groups + core::kScoreLanes - 1) / core::kScoreLanes;
  task.tree_groups = std::min<unsigned>(task.groups, core::kScoreLanes);
  task.tree_span = std::bit_ceil(task.tree_groups);
  task.by_groups = Divider(task.groups);
  task.by_trees = Divider(task.trees);
  task.by_tree_groups = Divider(task.tree_groups);
  task.aligned = is_aligned(tensor, 16) && sample_bytes % 16 == 0;
  return task;
}

// Launches a kernel whose blocks may start while the kernel before it in the stream still runs; it
// waits for that one itself. Only code compiled for 9.0 or later does, so what counts is the code
// that this device got, not the device.
Status launch_after(void (*kernel)(const SampleTask), unsigned blocks, int threads,
                    const SampleTask& task, cudaStream_t stream) {
  cudaFuncAttributes attributes{};
  Status status = check(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
  if (!status.ok()) return status;
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = attributes.ptxVersion >= 90 ? 1 : 0;
  return check(cudaLaunchKernelEx(&config, kernel, task), "sample kernel");
}

template <typename T>
unsigned tile_blocks(const SampleTask& task) {
  constexpr unsigned kGroups = FlatShape<T>::kGroupsPerThreadBlock;
  const unsigned groups = task.samples * task.groups;
  return groups / kGroups + (groups % kGroups != 0 ? 1 : 0);
}

}  // namespace

Status pack_samples(const SampleFormat& format, const void* source, const float* weights,
                    core::MixedKey key, void* payload, void* stream) {
  const core::SampleGeometry geometry(format);
  if (geometry.bytes == 0) return {};
  BACKFOLD_RETURN_IF_ERROR(check_groups(format, geometry));
  SampleTask task = task_of(format, geometry, source, payload);
  task.source = source;
  task.weights = weights;
  task.key = key;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  return core::with_element(format.type, [&]<typename T>() {
    const unsigned trees = kScoreGroups<T> / task.tree_groups;
    const unsigned blocks = (task.samples * task.trees + trees - 1) / trees;
    sum_trees_kernel<T><<<blocks, kScoreThreads, 0, cuda_stream>>>(task);
    BACKFOLD_RETURN_IF_ERROR(check_launch("sample kernel"));
    BACKFOLD_RETURN_IF_ERROR(launch_after(rank_samples_kernel,
                                          (task.samples + kRankSamples - 1) / kRankSamples,
                                          kRankThreads, task, cuda_stream));
    return launch_after(pack_samples_kernel<T>, tile_blocks<T>(task), kFlatThreads, task,
                        cuda_stream);
  });
}

Status unpack_samples(const SampleFormat& format, const void* payload, void* destination,
                      void* stream) {
  const core::SampleGeometry geometry(format);
  if (geometry.bytes == 0) return {};
  BACKFOLD_RETURN_IF_ERROR(check_groups(format, geometry));
  SampleTask task = task_of(format, geometry, destination, payload);
  task.destination = destination;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  return core::with_element(format.type, [&]<typename T>() {
    unpack_samples_kernel<T><<<tile_blocks<T>(task), kFlatThreads, 0, cuda_stream>>>(task);
    return check_launch("sample kernel");
  });
}

}  // namespace backfold::cuda
