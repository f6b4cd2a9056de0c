// SPDX-License-Identifier: Apache-2.0
//
// Compiled with OpenMP where that is the compiler's and torch's (cmake/torch.cmake). Without it,
// at::parallel_for is a plain loop.

#include "torch/codec/threads.h"

#include <ATen/Parallel.h>

#include <cstdint>

namespace backfold::torch_layer {
namespace {

void on_threads_of_torch(int parts, void (*work)(void* context, int part), void* context) {
  at::parallel_for(0, parts, 1, [&](std::int64_t begin, std::int64_t end) {
    for (auto part = static_cast<int>(begin); part < end; ++part) work(context, part);
  });
}

}  // namespace

Executor executor_of_torch() {
#ifdef INTRA_OP_PARALLEL
  return on_threads_of_torch;
#else
  return nullptr;
#endif
}

}  // namespace backfold::torch_layer
