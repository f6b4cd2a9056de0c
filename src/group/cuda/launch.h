// SPDX-License-Identifier: Apache-2.0
//
// From run-time options to kernels compiled for them. One launcher per layout, each in its own
// file.

#ifndef BACKFOLD_GROUP_CUDA_LAUNCH_H_
#define BACKFOLD_GROUP_CUDA_LAUNCH_H_

#include <cuda_runtime_api.h>

#include "backfold/group.h"
#include "base/convert.h"
#include "base/widths.h"

namespace backfold::cuda {

struct GroupTask;

Status launch_flat_groups(const GroupFormat& format, const GroupTask& task, bool pack,
                          cudaStream_t stream);
Status launch_rotated_groups(const GroupFormat& format, const GroupTask& task, bool pack,
                             cudaStream_t stream);
Status launch_strided_groups(const GroupFormat& format, const GroupTask& task, bool pack,
                             cudaStream_t stream);

// The same with values scaled by row.
Status launch_flat_scaled(const GroupFormat& format, const GroupTask& task, bool pack,
                          cudaStream_t stream);
Status launch_strided_scaled(const GroupFormat& format, const GroupTask& task, bool pack,
                             cudaStream_t stream);

// Calls work<T, bits>() for the format's type and width. 16 bits of a 16-bit type are not compiled:
// a valid format does not ask for them.
template <typename T, typename Work>
Status with_width(int bits, const Work& work) {
  return core::with_width<kCodeWidths>(bits, [&]<int kBits>() {
    if constexpr (kBits < 8 * sizeof(T)) {
      return work.template operator()<T, kBits>();
    } else {
      return Status::error(StatusCode::kInvalidArgument, "bits must be fewer than 16, got %d",
                           kBits);
    }
  });
}

template <typename Work>
Status with_type_and_width(const GroupFormat& format, Work work) {
  return core::with_element(format.type,
                            [&]<typename T>() { return with_width<T>(format.bits, work); });
}

// The same for types whose values may be scaled by row: all but fp64.
template <typename Work>
Status with_scaled_type_and_width(const GroupFormat& format, Work work) {
  switch (format.type) {
    case ElementType::kF16:
      return with_width<core::Half>(format.bits, work);
    case ElementType::kBF16:
      return with_width<core::BFloat>(format.bits, work);
    default:
      return with_width<float>(format.bits, work);
  }
}

}  // namespace backfold::cuda

#endif  // BACKFOLD_GROUP_CUDA_LAUNCH_H_
