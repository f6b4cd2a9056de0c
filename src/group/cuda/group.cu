// SPDX-License-Identifier: Apache-2.0
//
// The group quantizer's way to its kernels.

#include "group/cuda/group.h"

#include "base/convert.h"
#include "base/cuda/witness.h"
#include "group/cuda/launch.h"
#include "group/cuda/task.cuh"

namespace backfold::cuda {
namespace {

Status launch(const GroupFormat& format, const GroupTask& task, bool pack, void* stream) {
  if (format.count == 0) return {};
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (task.scaled.scale != nullptr)
    return format.layout == Layout::kStrided
               ? launch_strided_scaled(format, task, pack, cuda_stream)
               : launch_flat_scaled(format, task, pack, cuda_stream);
  switch (format.layout) {
    case Layout::kStrided:
      return launch_strided_groups(format, task, pack, cuda_stream);
    case Layout::kRotated:
      return launch_rotated_groups(format, task, pack, cuda_stream);
    default:
      return launch_flat_groups(format, task, pack, cuda_stream);
  }
}

// Mapping    one element per thread
// Launch     blocks of 256, a grid as large as the work
// Alignment  by element
// Bytes      source once
template <typename T>
__global__ void find_negative_kernel(const T* source, std::int64_t count, Witness* witness) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  if constexpr (sizeof(T) == 8) {
    if (source[i] < 0.0) testify(witness, i);
  } else {
    if (core::to_float(source[i]) < 0.0f) testify(witness, i);
  }
}

}  // namespace

Status pack_group(const GroupFormat& format, const void* source, core::MixedKey key, void* payload,
                  void* stream, const RowAffine* rows) {
  GroupTask task = group_task(format, payload, source, format.type);
  task.source = source;
  task.key = key;
  if (rows) task.scaled = row_task(*rows, format.count);
  return launch(format, task, true, stream);
}

Status unpack_group(const GroupFormat& format, const void* payload, void* destination, void* stream,
                    const RowAffine* rows) {
  GroupTask task = group_task(format, payload, destination, format.type);
  task.destination = destination;
  if (rows) task.scaled = row_task(*rows, format.count);
  return launch(format, task, false, stream);
}

Status find_negative(const GroupFormat& format, const void* source, void* stream,
                     std::int64_t* index) {
  *index = -1;
  if (format.count == 0) return {};
  unsigned blocks = 0;
  BACKFOLD_RETURN_IF_ERROR(blocks_for(format.count, 256, &blocks));
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  Witness witness;
  const Status status = core::with_element(format.type, [&]<typename T>() {
    const T* elements = static_cast<const T*>(source);
    return hear_witness(cuda_stream, &witness, [&](Witness* out) {
      find_negative_kernel<<<blocks, 256, 0, cuda_stream>>>(elements, format.count, out);
    });
  });
  *index = witness.index;
  return status;
}

}  // namespace backfold::cuda
