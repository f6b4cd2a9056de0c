// SPDX-License-Identifier: Apache-2.0

#include "base/checks.h"

#include <cinttypes>
#include <cstdint>
#include <string>

#include "backfold/widths.h"
#include "base/dispatch.h"

namespace backfold {

const char* name_of(ElementType type) {
  switch (type) {
    case ElementType::kF32:
      return "fp32";
    case ElementType::kF16:
      return "fp16";
    case ElementType::kBF16:
      return "bf16";
    case ElementType::kF64:
      return "fp64";
    case ElementType::kI64:
      return "int64";
    case ElementType::kI32:
      return "int32";
    case ElementType::kI16:
      return "int16";
    case ElementType::kBool:
      return "bool";
  }
  return "unknown";
}

const char* list_code_widths() {
  static const std::string list = [] {
    std::string text;
    for (const int width : kCodeWidths) text += (text.empty() ? "" : ", ") + std::to_string(width);
    return text;
  }();
  return list.c_str();
}

namespace core {

Status check_count(std::int64_t count) {
  if (count >= 0 && count <= kMaxElements) return {};
  return Status::error(StatusCode::kInvalidArgument,
                       "count must be between 0 and 2^48, got %" PRId64, count);
}

Status check_buffer(const char* argument, const void* data, std::int64_t count,
                    std::size_t element_bytes) {
  if (count == 0) return {};
  if (data == nullptr)
    return Status::error(StatusCode::kInvalidArgument,
                         "%s must not be null for %" PRId64 " elements", argument, count);
  if (reinterpret_cast<std::uintptr_t>(data) % element_bytes != 0)
    return Status::error(StatusCode::kInvalidArgument,
                         "%s must be aligned to its elements of %zu bytes, got %p", argument,
                         element_bytes, data);
  return {};
}

Status check_payload(ConstPayload payload, std::size_t needed) {
  if (payload.bytes < needed)
    return Status::error(StatusCode::kShortPayload, "payload must hold %zu bytes, got %zu", needed,
                         payload.bytes);
  if (needed == 0) return {};
  if (payload.data == nullptr)
    return Status::error(StatusCode::kInvalidArgument, "payload must not be null for %zu bytes",
                         needed);
  if (reinterpret_cast<std::uintptr_t>(payload.data) % kPayloadAlignment != 0)
    return Status::error(StatusCode::kInvalidArgument, "payload must be %zu-byte aligned, got %p",
                         kPayloadAlignment, payload.data);
  return {};
}

Status check_execution(const Execution& execution) {
  if (execution.threads < 1)
    return Status::error(StatusCode::kInvalidArgument, "threads must be at least 1, got %d",
                         execution.threads);
  const SimdTarget* target = nullptr;
  switch (execution.backend) {
    case Backend::kCpu:
      return find_cpu_target(environment_target(), &target);
    case Backend::kReference:
      return {};
    case Backend::kSimd:
      if (find_simd_target(execution.simd_target) != nullptr) return {};
      return Status::error(StatusCode::kUnavailable,
                           "simd_target '%.*s' is not among those of this build and machine: %s",
                           static_cast<int>(execution.simd_target.size()),
                           execution.simd_target.data(), list_simd_targets().c_str());
    case Backend::kCuda:
      return built_with_cuda() ? Status{} : no_cuda_kernels();
  }
  return Status::error(StatusCode::kInvalidArgument,
                       "backend must be cpu, reference, simd or cuda, got %d",
                       static_cast<int>(execution.backend));
}

Status no_cuda_kernels() {
  return Status::error(StatusCode::kUnavailable,
                       "backend is cuda, but this build holds no CUDA kernels; build with a CUDA "
                       "toolkit and -DBACKFOLD_CUDA=ON");
}

Status check_float_type(ElementType type) {
  switch (type) {
    case ElementType::kF32:
    case ElementType::kF16:
    case ElementType::kBF16:
    case ElementType::kF64:
      return {};
    default:
      return Status::error(StatusCode::kInvalidArgument,
                           "type must be fp32, fp16, bf16 or fp64, got %s (%d)", name_of(type),
                           static_cast<int>(type));
  }
}

Status check_call(const Execution& execution, const char* argument, const void* data,
                  std::int64_t count, std::size_t element_bytes, ConstPayload payload,
                  std::size_t needed) {
  BACKFOLD_RETURN_IF_ERROR(check_execution(execution));
  BACKFOLD_RETURN_IF_ERROR(check_buffer(argument, data, count, element_bytes));
  return check_payload(payload, needed);
}

}  // namespace core
}  // namespace backfold
