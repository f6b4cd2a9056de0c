// SPDX-License-Identifier: Apache-2.0
//
// How debug builds learn, from a look at device memory, which element breaks a contract.

#ifndef BACKFOLD_BASE_CUDA_WITNESS_H_
#define BACKFOLD_BASE_CUDA_WITNESS_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "backfold/status.h"
#include "base/checks.h"
#include "base/cuda/launch.h"

namespace backfold::cuda {

struct Witness {
  std::int64_t index = -1;    // the first element that breaks the contract; -1 for none
  std::uint64_t element = 0;  // for the kernels' own use
};

// Called by every thread whose element breaks the contract. As an unsigned number -1 is the
// largest.
inline __device__ void testify(Witness* witness, std::int64_t index) {
  atomicMin(reinterpret_cast<unsigned long long*>(&witness->index),
            static_cast<unsigned long long>(index));
}

// Lets `launch` enqueue kernels that look, waits for them, and brings back what they saw.
template <typename Launch>
Status hear_witness(cudaStream_t stream, Witness* found, const Launch& launch) {
  *found = Witness{};
  void* memory = nullptr;
  BACKFOLD_RETURN_IF_ERROR(
      check(cudaMallocAsync(&memory, sizeof(Witness), stream), "cudaMallocAsync"));
  Witness* const witness = static_cast<Witness*>(memory);
  Status status =
      check(cudaMemcpyAsync(witness, found, sizeof(Witness), cudaMemcpyHostToDevice, stream),
            "cudaMemcpyAsync");
  if (status.ok()) {
    launch(witness);
    status = check_launch("contract check");
  }
  if (status.ok())
    status = check(cudaMemcpyAsync(found, witness, sizeof(Witness), cudaMemcpyDeviceToHost, stream),
                   "cudaMemcpyAsync");
  const Status freed = check(cudaFreeAsync(witness, stream), "cudaFreeAsync");
  const Status waited = check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  if (!status.ok()) return status;
  return freed.ok() ? waited : freed;
}

}  // namespace backfold::cuda

#endif  // BACKFOLD_BASE_CUDA_WITNESS_H_
