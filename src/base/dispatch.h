// SPDX-License-Identifier: Apache-2.0
//
// Which backend serves a call.

#ifndef BACKFOLD_BASE_DISPATCH_H_
#define BACKFOLD_BASE_DISPATCH_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "backfold/execution.h"
#include "base/rng.h"

namespace backfold::core {

struct SimdTarget {
  std::string_view name;
  std::int64_t bit;  // Highway's
};

// The target of that name, or the best one for an empty name; null where there is none.
const SimdTarget* find_simd_target(std::string_view name);

// The names of simd_targets(), separated by commas; "none" if there are none.
std::string list_simd_targets();

// What BACKFOLD_TARGET names in the environment, empty for nothing. Read once, so that a program
// may change its environment while other threads pack.
std::string_view environment_target();

// What serves Backend::kCpu, null for the reference, where `name` is forced: one of simd_targets(),
// "reference", or empty for the best. Any other name is an error that lists those.
Status find_cpu_target(std::string_view name, const SimdTarget** target);

// The SIMD target that an execution asks for, null for the reference. It has passed
// check_execution().
const SimdTarget* choose_host_target(const Execution& execution);

// Whether CUDA kernels serve a call. Tells execution.ran where they do.
bool choose_cuda(const Execution& execution);

// The key of a call, as its backend takes it.
MixedKey mixed_for(const Key& key, const Execution& execution);

// Tells execution.ran that kernels of this target ran, by Highway's bit; 0 is the reference.
void report_target(const Execution& execution, std::int64_t target_bit);

// The SIMD kernels that serve a host call, none where the reference does. Reports to execution.ran
// what they were compiled for, whatever was asked for.
template <typename Kernels>
std::optional<Kernels> choose_kernels(const Execution& execution,
                                      Kernels (*kernels_of)(std::int64_t target_bit)) {
  std::optional<Kernels> kernels;
  if (const SimdTarget* target = choose_host_target(execution)) kernels = kernels_of(target->bit);
  report_target(execution, kernels ? kernels->target : 0);
  return kernels;
}

}  // namespace backfold::core

#endif  // BACKFOLD_BASE_DISPATCH_H_
