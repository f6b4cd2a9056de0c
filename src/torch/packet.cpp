// SPDX-License-Identifier: Apache-2.0

#include "torch/packet.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <sstream>

namespace backfold::torch_layer {
namespace {

void check(const Status& status) {
  TORCH_CHECK_VALUE(
      status.code() != StatusCode::kInvalidArgument && status.code() != StatusCode::kShortPayload,
      "backfold: ", status.message());
  TORCH_CHECK(status.ok(), "backfold: ", status.message());
}

ElementType element_type(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return ElementType::kF32;
    case at::kHalf:
      return ElementType::kF16;
    case at::kBFloat16:
      return ElementType::kBF16;
    case at::kDouble:
      return ElementType::kF64;
    default:
      TORCH_CHECK_TYPE(
          false, "backfold: tensor must be float32, float16, bfloat16 or float64, got ", type);
  }
}

Layout layout_named(std::string_view name) {
  if (name == "flat") return Layout::kFlat;
  if (name == "strided") return Layout::kStrided;
  if (name == "rotated") return Layout::kRotated;
  TORCH_CHECK_VALUE(false, "backfold: layout must be 'flat', 'strided' or 'rotated', got '",
                    std::string(name), "'");
}

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

}  // namespace

GroupFormat format_for(at::ScalarType type, at::IntArrayRef sizes, at::IntArrayRef strides,
                       const PackOptions& options) {
  GroupFormat format;
  format.type = element_type(type);
  TORCH_CHECK_VALUE(options.bits >= 1 && options.bits <= 16,
                    "backfold: bits must be one of 1, 2, 3, 4, 5, 6, 8, 16, got ", options.bits);
  TORCH_CHECK_VALUE(options.group == 128 || options.group == 256,
                    "backfold: group must be 128 or 256, got ", options.group);
  format.bits = static_cast<int>(options.bits);
  format.group = static_cast<int>(options.group);
  format.layout = layout_named(options.layout);
  format.zero_exact = options.zero_exact;
  format.count = c10::multiply_integers(sizes);
  if (format.layout == Layout::kStrided) {
    format.columns = 1;
    for (std::size_t i = 0; i < sizes.size(); ++i)
      if (strides[i] == 1 && sizes[i] > 1) format.columns = sizes[i];
  }
  check(validate(format));
  return format;
}

at::Tensor pack_payload(const at::Tensor& source, const GroupFormat& format, const Key& key) {
  TORCH_CHECK_VALUE(source.is_non_overlapping_and_dense(),
                    "backfold: tensor must be dense, got sizes ", source.sizes(), " with strides ",
                    source.strides());
  const c10::DeviceGuard guard(source.device());
  const Execution execution = execution_on(source.device());
  const std::size_t bytes = packed_bytes(format);
  at::Tensor payload =
      at::empty({static_cast<std::int64_t>(bytes)}, source.options().dtype(at::kByte));
  check(pack(format, source.const_data_ptr(), key, Payload{payload.mutable_data_ptr(), bytes},
             execution));
  return payload;
}

at::Tensor unpack_payload(const at::Tensor& payload, const GroupFormat& format,
                          at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type) {
  TORCH_CHECK_TYPE(payload.scalar_type() == at::kByte, "backfold: payload must be uint8, got ",
                   payload.scalar_type());
  TORCH_CHECK_VALUE(payload.is_contiguous(), "backfold: payload must be contiguous");
  const c10::DeviceGuard guard(payload.device());
  const Execution execution = execution_on(payload.device());
  at::Tensor result = at::empty_strided(sizes, strides, payload.options().dtype(type));
  TORCH_CHECK_VALUE(result.is_non_overlapping_and_dense(),
                    "backfold: size and stride must be those of a dense tensor, got ", sizes,
                    " and ", strides);
  check(unpack(format,
               ConstPayload{payload.const_data_ptr(), static_cast<std::size_t>(payload.nbytes())},
               result.mutable_data_ptr(), execution));
  return result;
}

Packet::Packet(const at::Tensor& source, const PackOptions& options)
    : type_(source.scalar_type()),
      source_bytes_(source.numel() * static_cast<std::int64_t>(source.element_size())) {
  TORCH_CHECK_TYPE(source.layout() == at::kStrided,
                   "backfold: tensor must be strided (not sparse or nested), got layout ",
                   source.layout());
  const at::AutoGradMode no_grad(false);
  const at::Tensor dense =
      (source.is_non_overlapping_and_dense() ? source : source.contiguous()).detach();
  sizes_ = dense.sizes().vec();
  strides_ = dense.strides().vec();
  format_ = format_for(type_, sizes_, strides_, options);
  exact_ = static_cast<std::int64_t>(packed_bytes(format_)) >= source_bytes_;
  payload_ = exact_ ? dense.clone() : pack_payload(dense, format_, options.key);
}

at::Tensor Packet::unpack() const {
  const at::AutoGradMode no_grad(false);
  return exact_ ? payload_.clone() : unpack_payload(payload_, format_, sizes_, strides_, type_);
}

std::string Packet::describe() const {
  std::ostringstream text;
  text << "Packet(" << type_ << ' ' << at::IntArrayRef(sizes_) << ", ";
  if (exact_) {
    text << "kept as it is";
  } else {
    constexpr const char* kLayouts[] = {"flat", "strided", "rotated"};
    text << format_.bits << (format_.bits == 1 ? " bit, " : " bits, ")
         << kLayouts[static_cast<int>(format_.layout)];
  }
  text << ", " << bytes() << " of " << source_bytes_ << " bytes)";
  return text.str();
}

}  // namespace backfold::torch_layer
