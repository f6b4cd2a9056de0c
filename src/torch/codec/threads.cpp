// SPDX-License-Identifier: Apache-2.0
//
// Compiled with OpenMP (cmake/torch.cmake), without which at::parallel_for is a plain loop.

#include "torch/codec/threads.h"

#include <ATen/Parallel.h>

#include <cstdint>

#if AT_PARALLEL_OPENMP && !defined(_OPENMP)
#error "torch's threads are OpenMP's, and this compiler has no OpenMP"
#endif

namespace backfold::torch_layer {

void on_threads_of_torch(int parts, void (*work)(void* context, int part), void* context) {
  at::parallel_for(0, parts, 1, [&](std::int64_t begin, std::int64_t end) {
    for (auto part = static_cast<int>(begin); part < end; ++part) work(context, part);
  });
}

}  // namespace backfold::torch_layer
