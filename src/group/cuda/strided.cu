// SPDX-License-Identifier: Apache-2.0

#include "group/cuda/launch.h"
#include "group/cuda/strided.cuh"

namespace backfold::cuda {

Status launch_strided_groups(const GroupFormat& format, const GroupTask& task, bool pack,
                             cudaStream_t stream) {
  return with_type_and_width(format, [&]<typename T, int kBits>() {
    if constexpr (kBits > 1) {
      if (format.zero_exact) return launch_strided<T, kBits, true>(task, pack, stream);
    }
    return launch_strided<T, kBits, false>(task, pack, stream);
  });
}

}  // namespace backfold::cuda
