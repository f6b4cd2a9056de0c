// SPDX-License-Identifier: Apache-2.0

#include "group/cuda/flat.cuh"
#include "group/cuda/launch.h"

namespace backfold::cuda {

Status launch_flat_scaled(const GroupFormat& format, const GroupTask& task, bool pack,
                          cudaStream_t stream) {
  return with_scaled_type_and_width(format, [&]<typename T, int kBits>() {
    return launch_flat<T, kBits, false, false, true>(task, pack, stream);
  });
}

}  // namespace backfold::cuda
