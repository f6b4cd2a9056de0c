// SPDX-License-Identifier: Apache-2.0

#include "group/cuda/flat.cuh"
#include "group/cuda/launch.h"

namespace backfold::cuda {
namespace {

// Groups of 256 take the way of groups off the fast path, which knows widths at run time: no plan
// asks for them, and 112 kernels of their own took as long to compile as those of 128.

// Mapping    one group per warp
// Launch     blocks of 256, a grid as large as the work
// Alignment  by element
// Bytes      source once, headers and codes once
template <typename T>
__global__ void __launch_bounds__(kFlatThreads)
    pack_large_kernel(const __grid_constant__ GroupTask task) {
  zero_header_padding(task);
  const std::int64_t group = warp_number();
  if (group < task.groups)
    pack_special<T>(task, group, static_cast<const T*>(task.source) + group * task.group, 1,
                    elements_of(task, group));
}

// Mapping    as packing
// Launch     as packing
// Alignment  by element
// Bytes      headers and codes once, destination once
template <typename T>
__global__ void __launch_bounds__(kFlatThreads)
    unpack_large_kernel(const __grid_constant__ GroupTask task) {
  const std::int64_t group = warp_number();
  if (group < task.groups)
    unpack_special<T>(task, group, static_cast<T*>(task.destination) + group * task.group, 1,
                      elements_of(task, group));
}

template <typename T>
Status launch_large(const GroupTask& task, bool pack, cudaStream_t stream) {
  unsigned blocks = 0;
  const Status fits = blocks_for(task.groups, kFlatThreads / 32, &blocks);
  if (!fits.ok()) return fits;
  if (pack)
    pack_large_kernel<T><<<blocks, kFlatThreads, 0, stream>>>(task);
  else
    unpack_large_kernel<T><<<blocks, kFlatThreads, 0, stream>>>(task);
  return check_launch("group kernel");
}

}  // namespace

Status launch_flat_groups(const GroupFormat& format, const GroupTask& task, bool pack,
                          cudaStream_t stream) {
  if (format.group != kGroup)
    return core::with_element(format.type,
                              [&]<typename T>() { return launch_large<T>(task, pack, stream); });
  return with_type_and_width(format, [&]<typename T, int kBits>() {
    if constexpr (kBits > 1) {
      if (format.zero_exact) return launch_flat<T, kBits, true, false>(task, pack, stream);
    }
    return launch_flat<T, kBits, false, false>(task, pack, stream);
  });
}

}  // namespace backfold::cuda
