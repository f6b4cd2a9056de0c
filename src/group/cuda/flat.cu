// SPDX-License-Identifier: Apache-2.0

#include "group/cuda/flat.cuh"
#include "group/cuda/launch.h"

namespace backfold::cuda {

Status launch_flat_groups(const GroupFormat& format, const GroupTask& task, bool pack,
                          cudaStream_t stream) {
  return with_type_and_width(format, [&]<typename T, int kBits>() {
    if constexpr (kBits > 1) {
      if (format.zero_exact)
        return format.group == 256 ? launch_flat<T, 256, kBits, true, false>(task, pack, stream)
                                   : launch_flat<T, 128, kBits, true, false>(task, pack, stream);
    }
    return format.group == 256 ? launch_flat<T, 256, kBits, false, false>(task, pack, stream)
                               : launch_flat<T, 128, kBits, false, false>(task, pack, stream);
  });
}

}  // namespace backfold::cuda
