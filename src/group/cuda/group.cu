// SPDX-License-Identifier: Apache-2.0
//
// The group quantizer's way to its kernels.

#include "group/cuda/group.h"

#include "base/convert.h"
#include "base/cuda/witness.h"
#include "group/cuda/launch.h"
#include "group/cuda/task.cuh"
#include "group/geometry.h"

namespace backfold::cuda {
namespace {

RowTask rows_of(const RowAffine& rows, std::int64_t count) {
  constexpr std::int64_t kLimit = std::int64_t{1} << 31;
  RowTask task{};
  task.shift = rows.shift;
  task.scale = rows.scale;
  task.run = rows.run;
  task.rows = rows.rows;
  task.wide = count >= kLimit || rows.run >= kLimit || rows.rows >= kLimit;
  if (!task.wide) {
    task.by_run = Divider(rows.run);
    task.by_rows = Divider(rows.rows);
  }
  return task;
}

GroupTask task_of(const GroupFormat& format, const void* tensor, const void* payload,
                  core::MixedKey key, const RowAffine* rows) {
  const core::GroupGeometry geometry(format);
  auto* bytes = static_cast<std::uint8_t*>(const_cast<void*>(payload));
  const std::int64_t row_bytes = format.columns * static_cast<std::int64_t>(size_of(format.type));
  GroupTask task{};
  task.headers = reinterpret_cast<std::uint32_t*>(bytes);
  task.codes = bytes + geometry.header_bytes;
  task.groups = geometry.groups;
  task.count = format.count;
  task.columns = format.columns;
  task.rows = format.columns > 0 ? format.count / format.columns : 0;
  task.key = key;
  task.bits = format.bits;
  task.group = format.group;
  task.zero_exact = format.zero_exact;
  task.rotated = format.layout == Layout::kRotated;
  task.aligned =
      is_aligned(tensor, 16) && (format.layout != Layout::kStrided || row_bytes % 16 == 0);
  if (rows) task.scaled = rows_of(*rows, format.count);
  return task;
}

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
  GroupTask task = task_of(format, source, payload, key, rows);
  task.source = source;
  return launch(format, task, true, stream);
}

Status unpack_group(const GroupFormat& format, const void* payload, void* destination, void* stream,
                    const RowAffine* rows) {
  GroupTask task = task_of(format, destination, payload, {}, rows);
  task.destination = destination;
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
