// SPDX-License-Identifier: Apache-2.0

#include "core/dispatch.h"

#include "cpu/targets.h"

namespace backfold {

std::span<const std::string_view> simd_targets() { return cpu::targets().names; }

bool built_with_cuda() {
#ifdef BACKFOLD_WITH_CUDA
  return true;
#else
  return false;
#endif
}

namespace core {

const SimdTarget* find_simd_target(std::string_view name) {
  for (const SimdTarget& target : cpu::targets().targets)
    if (name.empty() || name == target.name) return &target;
  return nullptr;
}

std::string list_simd_targets() {
  std::string list;
  for (const std::string_view name : simd_targets()) {
    if (!list.empty()) list += ", ";
    list += name;
  }
  return list.empty() ? "none" : list;
}

const SimdTarget* choose_host_target(const Execution& execution) {
  const SimdTarget* target = nullptr;
  if (execution.backend == Backend::kCpu) target = find_simd_target({});
  if (execution.backend == Backend::kSimd) target = find_simd_target(execution.simd_target);
  if (execution.ran != nullptr) *execution.ran = target != nullptr ? target->name : "reference";
  return target;
}

}  // namespace core
}  // namespace backfold
