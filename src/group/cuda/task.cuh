// SPDX-License-Identifier: Apache-2.0
//
// What a group quantizer's kernel is given.

#ifndef BACKFOLD_GROUP_CUDA_TASK_CUH_
#define BACKFOLD_GROUP_CUDA_TASK_CUH_

#include <cstdint>

#include "base/cuda/launch.h"
#include "base/rng.h"
#include "group/cuda/rows.cuh"
#include "group/geometry.h"

namespace backfold::cuda {

// Elements of the groups that most kernels are compiled for.
inline constexpr int kGroup = 128;

// A packing or unpacking job, by value to a kernel. The tensor pointer is cast by the kernel.
struct GroupTask {
  const void* source;
  void* destination;
  std::uint32_t* headers;
  std::uint8_t* codes;
  std::int64_t groups;
  std::int64_t count;
  std::int64_t rows;  // rows and columns of a strided tensor
  std::int64_t columns;
  unsigned tiles_across;     // that cover its columns
  std::int64_t first_group;  // what group 0 draws as, where it is part of a larger tensor
  core::MixedKey key;
  int bits;
  int group;
  bool zero_exact;
  bool rotated;
  bool aligned;    // the tensor (and each of its rows, if strided) starts on 16 bytes
  RowTask scaled;  // for kernels that scale values by row
};

// What packing and unpacking have in common. `tensor` has elements of that type.
inline GroupTask group_task(const GroupFormat& format, const void* payload, const void* tensor,
                            ElementType type) {
  const core::GroupGeometry geometry(format);
  auto* bytes = static_cast<std::uint8_t*>(const_cast<void*>(payload));
  const std::int64_t row_bytes = format.columns * static_cast<std::int64_t>(size_of(type));
  GroupTask task{};
  task.headers = reinterpret_cast<std::uint32_t*>(bytes);
  task.codes = bytes + geometry.header_bytes;
  task.groups = geometry.groups;
  task.count = format.count;
  task.columns = format.columns;
  task.rows = format.columns > 0 ? format.count / format.columns : 0;
  task.bits = format.bits;
  task.group = format.group;
  task.zero_exact = format.zero_exact;
  task.rotated = format.layout == Layout::kRotated;
  task.aligned =
      is_aligned(tensor, 16) && (format.layout != Layout::kStrided || row_bytes % 16 == 0);
  return task;
}

// The headers are padded to 16 bytes with zeros.
__device__ inline void zero_header_padding(const GroupTask& task) {
  if (blockIdx.x == 0 && threadIdx.x < (4u - (task.groups & 3)) % 4u)
    task.headers[task.groups + threadIdx.x] = 0;
}

}  // namespace backfold::cuda

#endif  // BACKFOLD_GROUP_CUDA_TASK_CUH_
