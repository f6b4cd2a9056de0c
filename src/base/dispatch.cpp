// SPDX-License-Identifier: Apache-2.0

#include "base/dispatch.h"

#include <cstdlib>

#include "base/cuda/capture.h"
#include "base/targets.h"

namespace backfold {

std::span<const std::string_view> simd_targets() { return cpu::targets().names; }

bool built_with_cuda() { return BACKFOLD_WITH_CUDA != 0; }

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

std::string_view environment_target() {
  static const std::string name = [] {
    const char* value = std::getenv("BACKFOLD_TARGET");
    return std::string(value != nullptr ? value : "");
  }();
  return name;
}

Status find_cpu_target(std::string_view name, const SimdTarget** target) {
  *target = find_simd_target(name);
  if (*target != nullptr || name.empty() || name == "reference") return {};
  return Status::error(StatusCode::kUnavailable,
                       "BACKFOLD_TARGET '%.*s' is neither reference nor among the SIMD targets of "
                       "this build and machine: %s",
                       static_cast<int>(name.size()), name.data(), list_simd_targets().c_str());
}

const SimdTarget* choose_host_target(const Execution& execution) {
  const SimdTarget* target = nullptr;
  if (execution.backend == Backend::kCpu) (void)find_cpu_target(environment_target(), &target);
  if (execution.backend == Backend::kSimd) target = find_simd_target(execution.simd_target);
  return target;
}

bool choose_cuda(const Execution& execution) {
  if (execution.backend != Backend::kCuda) return false;
  if (execution.ran != nullptr) *execution.ran = "cuda";
  return true;
}

MixedKey mixed_for(const Key& key, const Execution& execution) {
  return execution.backend == Backend::kCuda ? mixed(key) : mixed_on_host(key);
}

void report_target(const Execution& execution, std::int64_t target_bit) {
  if (execution.ran == nullptr) return;
  *execution.ran = target_bit == 0 ? "reference" : cpu::target_name(target_bit);
}

}  // namespace core

bool is_captured(const Execution& execution) {
  return execution.backend == Backend::kCuda && cuda::is_capturing(execution.stream);
}

}  // namespace backfold
