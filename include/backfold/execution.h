// SPDX-License-Identifier: Apache-2.0
//
// Execution: where and how a call runs.
//
// The same call gives the same bytes on every backend, so choosing one is a matter of speed and of
// where the memory is. Forcing one is for tests and benchmarks.

#ifndef BACKFOLD_EXECUTION_H_
#define BACKFOLD_EXECUTION_H_

#include <cstdint>
#include <span>
#include <string_view>

#include "backfold/status.h"

namespace backfold {

enum class Backend : std::uint8_t {
  kCpu,        // host memory: the best SIMD target of this machine, else the reference;
               // BACKFOLD_TARGET in the environment names one of simd_targets(), or "reference"
  kReference,  // host memory: the scalar loops that define each codec
  kSimd,       // host memory: SIMD or an error
  kCuda,       // device memory
};

// Calls work(context, part) for each part below `parts`, on as many threads as it likes, and
// returns when all are done.
using Executor = void (*)(int parts, void (*work)(void* context, int part), void* context);

struct Execution {
  Backend backend = Backend::kCpu;

  // Host threads that share the work, this one included. They split on group borders only.
  int threads = 1;

  // Runs their shares, on a pool that the program has. If there is none, threads are started for
  // the call.
  Executor executor = nullptr;

  // For kSimd: one of simd_targets(); empty means the best.
  std::string_view simd_target = {};

  // For kCuda: a cudaStream_t. The call returns when its kernels are enqueued there; memory must
  // stay valid until they have run.
  void* stream = nullptr;

  // If given, receives the name of what ran: "cuda", the SIMD target that the kernels were compiled
  // for, or "reference", also of what has no SIMD kernels (copies, signs).
  std::string_view* ran = nullptr;
};

// Names of the SIMD targets that this build has and this machine runs, best first.
std::span<const std::string_view> simd_targets();

// Whether calls of an execution are recorded into a CUDA graph, to run later and perhaps often.
bool is_captured(const Execution& execution);

// Whether this build holds CUDA kernels. Says nothing about a GPU being there.
bool built_with_cuda();

}  // namespace backfold

#endif  // BACKFOLD_EXECUTION_H_
