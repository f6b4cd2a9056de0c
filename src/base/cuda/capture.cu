// SPDX-License-Identifier: Apache-2.0

#include "base/cuda/capture.h"

#include <cuda_runtime_api.h>

namespace backfold::cuda {

bool is_capturing(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  // Fails for the legacy stream while another one is captured, which then is not this one.
  if (cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace backfold::cuda
