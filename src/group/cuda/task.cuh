// SPDX-License-Identifier: Apache-2.0
//
// What a group quantizer's kernel is given.

#ifndef BACKFOLD_GROUP_CUDA_TASK_CUH_
#define BACKFOLD_GROUP_CUDA_TASK_CUH_

#include <cstdint>

#include "base/cuda/launch.h"
#include "base/rng.h"
#include "group/cuda/rows.cuh"

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

// The headers are padded to 16 bytes with zeros.
__device__ inline void zero_header_padding(const GroupTask& task) {
  if (blockIdx.x == 0 && threadIdx.x < (4u - (task.groups & 3)) % 4u)
    task.headers[task.groups + threadIdx.x] = 0;
}

}  // namespace backfold::cuda

#endif  // BACKFOLD_GROUP_CUDA_TASK_CUH_
