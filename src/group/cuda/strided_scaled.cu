// SPDX-License-Identifier: Apache-2.0

#include "group/cuda/launch.h"
#include "group/cuda/strided.cuh"

namespace backfold::cuda {

Status launch_strided_scaled(const GroupFormat& format, const GroupTask& task, bool pack,
                             cudaStream_t stream) {
  return with_scaled_type_and_width(format, [&]<typename T, int kBits>() {
    return launch_strided<T, kBits, false, true>(task, pack, stream);
  });
}

}  // namespace backfold::cuda
