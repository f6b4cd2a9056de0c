// SPDX-License-Identifier: Apache-2.0

#include "torch/codec.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace backfold::torch_layer {
namespace {

// Where the core runs for tensors of a device.
Execution execution_on(const at::Device& device) {
  Execution execution;
  if (device.is_cpu()) {
    execution.threads = at::get_num_threads();
    return execution;
  }
  TORCH_CHECK_VALUE(device.is_cuda(), "backfold: tensor must be on a CPU or CUDA device, got ",
                    device);
  TORCH_CHECK(built_with_cuda(), "backfold: this build holds no CUDA kernels, but a tensor is on ",
              device,
              ". Build Backfold where a CUDA toolkit (nvcc) is found: pip install "
              "--no-build-isolation .");
  execution.backend = Backend::kCuda;
  execution.stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
  return execution;
}

Status pack_with(const GroupFormat& format, const void* source, const Key& key, Payload payload,
                 const Execution& execution) {
  return pack(format, source, key, payload, execution);
}

template <typename Lossless>
Status pack_with(const Lossless& format, const void* source, const Key&, Payload payload,
                 const Execution& execution) {
  return pack(format, source, payload, execution);
}

}  // namespace

void check(const Status& status) {
  TORCH_CHECK_VALUE(
      status.code() != StatusCode::kInvalidArgument && status.code() != StatusCode::kShortPayload,
      "backfold: ", status.message());
  TORCH_CHECK(status.ok(), "backfold: ", status.message());
}

std::optional<ElementType> element_type(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return ElementType::kF32;
    case at::kHalf:
      return ElementType::kF16;
    case at::kBFloat16:
      return ElementType::kBF16;
    case at::kDouble:
      return ElementType::kF64;
    case at::kLong:
      return ElementType::kI64;
    case at::kInt:
      return ElementType::kI32;
    case at::kShort:
      return ElementType::kI16;
    case at::kBool:
      return ElementType::kBool;
    default:
      return std::nullopt;
  }
}

bool supports(const at::Device& device) {
  return device.is_cpu() || (device.is_cuda() && built_with_cuda());
}

std::int64_t packed_bytes(const Format& format) {
  return static_cast<std::int64_t>(
      std::visit([](const auto& one) { return backfold::packed_bytes(one); }, format));
}

int code_bits(const Format& format) {
  if (const auto* group = std::get_if<GroupFormat>(&format)) return group->bits;
  if (const auto* narrow = std::get_if<NarrowFormat>(&format))
    return 8 * static_cast<int>(code_bytes(*narrow));
  return 1;
}

at::Tensor allocate(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type,
                    const at::Device& device) {
  const auto key = device.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA;
  return at::Tensor(at::detail::empty_strided_generic(
      sizes, strides, c10::GetAllocator(device.type()), c10::DispatchKeySet(key), type));
}

at::Tensor pack_payload(const void* source, const at::Device& device, const Format& format,
                        const Key& key) {
  const c10::DeviceGuard guard(device);
  const Execution execution = execution_on(device);
  const std::int64_t bytes = packed_bytes(format);
  at::Tensor payload = allocate({bytes}, {1}, at::kByte, device);
  const Payload target{payload.mutable_data_ptr(), static_cast<std::size_t>(bytes)};
  check(std::visit([&](const auto& one) { return pack_with(one, source, key, target, execution); },
                   format));
  return payload;
}

at::Tensor pack_payload(const at::Tensor& source, const Format& format, const Key& key) {
  TORCH_CHECK_VALUE(source.is_non_overlapping_and_dense(),
                    "backfold: tensor must be dense, got sizes ", source.sizes(), " with strides ",
                    source.strides());
  return pack_payload(source.const_data_ptr(), source.device(), format, key);
}

at::Tensor unpack_payload(const at::Tensor& payload, const Format& format, at::IntArrayRef sizes,
                          at::IntArrayRef strides, at::ScalarType type) {
  TORCH_CHECK_TYPE(payload.scalar_type() == at::kByte, "backfold: payload must be uint8, got ",
                   payload.scalar_type());
  TORCH_CHECK_VALUE(payload.is_contiguous(), "backfold: payload must be contiguous");
  const c10::DeviceGuard guard(payload.device());
  const Execution execution = execution_on(payload.device());
  at::Tensor result = allocate(sizes, strides, type, payload.device());
  TORCH_CHECK_VALUE(result.is_non_overlapping_and_dense(),
                    "backfold: size and stride must be those of a dense tensor, got ", sizes,
                    " and ", strides);
  const ConstPayload from{payload.const_data_ptr(), static_cast<std::size_t>(payload.nbytes())};
  check(std::visit(
      [&](const auto& one) { return unpack(one, from, result.mutable_data_ptr(), execution); },
      format));
  return result;
}

}  // namespace backfold::torch_layer
