// SPDX-License-Identifier: Apache-2.0

#include "lossless/cuda/copy.h"

#include "base/cuda/launch.h"

namespace backfold::cuda {

Status copy(const void* source, void* destination, std::size_t bytes, void* stream) {
  if (bytes == 0) return {};
  return check(cudaMemcpyAsync(destination, source, bytes, cudaMemcpyDeviceToDevice,
                               static_cast<cudaStream_t>(stream)),
               "cudaMemcpyAsync");
}

}  // namespace backfold::cuda
