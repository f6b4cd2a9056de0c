// SPDX-License-Identifier: Apache-2.0

#include "torch/codec/codec.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cmath>

#include "torch/codec/host_target.h"
#include "torch/codec/reused_memory.h"
#include "torch/codec/threads.h"

namespace backfold::torch_layer {
namespace {

// A packet in the making.
struct Packing {
  const void* source;
  const at::Device& device;
  const Key& key;
  Payload payload;
  const Execution& execution;
  CodecMemory* memory;
};

template <typename Lossless>
Status pack_with(const Lossless& format, const Packing& to) {
  return pack(format, to.source, to.payload, to.execution);
}

Status pack_with(const GroupFormat& format, const Packing& to) {
  return pack(format, to.source, to.key, to.payload, to.execution);
}

Status pack_with(const PoolFormat& format, const Packing& to) {
  return pack(format, to.source, to.key, to.payload, to.execution);
}

Status pack_with(const SampleFormat& format, const Packing& to) {
  const at::Tensor weights = to.memory ? to.memory->weights : at::Tensor();
  const bool weighted = weights.defined() && weights.numel() == format.samples;
  return pack(format, to.source, weighted ? weights.const_data_ptr<float>() : nullptr, to.key,
              to.payload, to.execution);
}

Status pack_with(const ProjectFormat& format, const Packing& to) {
  const at::Tensor projected = project(format, to.source, to.device, to.execution);
  return pack(format.codes, projected.const_data_ptr(), to.key, to.payload, to.execution);
}

// Packs with the union of the running range and this tensor's own, so that nothing is clipped and
// the result stays unbiased. The running range then moves towards the tensor's.
Status pack_with(const RangedFormat& format, const Packing& to) {
  const at::AutoGradMode no_grad(false);
  const at::Tensor own =
      at::empty({format.channels, 2}, at::TensorOptions(at::kFloat).device(to.device));
  own.select(1, 0).fill_(INFINITY);
  own.select(1, 1).fill_(-INFINITY);
  Status status = widen(format, to.source, own.const_data_ptr<float>(),
                        own.mutable_data_ptr<float>(), to.execution);
  if (!status.ok()) return status;
  at::Tensor used = own;
  if (to.memory) {
    at::Tensor& running = to.memory->ranges;
    if (running.defined() && running.sizes() == own.sizes()) {
      running = running.to(own.device());  // a loaded state is on the CPU
      used = at::stack({at::minimum(running.select(1, 0), own.select(1, 0)),
                        at::maximum(running.select(1, 1), own.select(1, 1))},
                       1);
      // A channel without finite elements has no range to learn from.
      running = at::where(own.isfinite(), running.lerp(own, 1 - to.memory->decay), running);
    } else {
      running = own.nan_to_num(0, 0, 0);
    }
  }
  return pack(format, to.source, used.const_data_ptr<float>(), to.key, to.payload, to.execution);
}

template <typename OfCore>
Status unpack_with(const OfCore& format, ConstPayload from, const at::Tensor& result,
                   const Execution& execution) {
  return unpack(format, from, result.mutable_data_ptr(), execution);
}

Status unpack_with(const ProjectFormat& format, ConstPayload from, const at::Tensor& result,
                   const Execution& execution) {
  const at::Tensor projected =
      allocate({format.rows, format.kept}, {format.kept, 1}, result.scalar_type(), result.device());
  const Status status = unpack(format.codes, from, projected.mutable_data_ptr(), execution);
  if (status.ok()) project_back(format, projected, result, execution);
  return status;
}

}  // namespace

Execution execution_on(const at::Device& device) {
  Execution execution;
  if (device.is_cpu()) {
    execution.threads = at::in_parallel_region() ? 1 : at::get_num_threads();
    execution.executor = executor_of_torch();
    follow_host_target(execution);
    return execution;
  }
  TORCH_CHECK_VALUE(device.is_cuda(), "backfold: tensor must be on a CPU or CUDA device, got ",
                    device);
  TORCH_CHECK(built_with_cuda(), "backfold: this build has no CUDA kernels, but a tensor is on ",
              device,
              ". Build Backfold on a machine with a CUDA toolkit (nvcc): pip install "
              "--no-build-isolation .");
  execution.backend = Backend::kCuda;
  execution.stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
  return execution;
}

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

at::ScalarType scalar_type(ElementType type) {
  switch (type) {
    case ElementType::kF16:
      return at::kHalf;
    case ElementType::kBF16:
      return at::kBFloat16;
    case ElementType::kF64:
      return at::kDouble;
    default:
      return at::kFloat;
  }
}

bool supports(const at::Device& device) {
  return device.is_cpu() || (device.is_cuda() && built_with_cuda());
}

std::int64_t packed_bytes(const Format& format) {
  return static_cast<std::int64_t>(
      std::visit([](const auto& one) -> std::size_t { return packed_bytes(one); }, format));
}

void set_count(Format& format, std::int64_t count) {
  std::visit(
      [&](auto& one) {
        if constexpr (requires { one.count = count; }) one.count = count;
      },
      format);
}

bool is_lossless(const Format& format) {
  return std::holds_alternative<PredicateFormat>(format) ||
         std::holds_alternative<MaskFormat>(format) || std::holds_alternative<NarrowFormat>(format);
}

int code_bits(const Format& format) {
  if (const auto* pool = std::get_if<PoolFormat>(&format)) return pool->bits;
  if (const auto* ranged = std::get_if<RangedFormat>(&format)) return ranged->bits;
  if (const auto* table = std::get_if<TableFormat>(&format)) return table->bits;
  if (const auto* project = std::get_if<ProjectFormat>(&format)) return project->codes.bits;
  if (const auto* samples = std::get_if<SampleFormat>(&format)) {
    double bits = 0;
    for (std::size_t i = 0; i < kSampleWidths.size(); ++i)
      bits += static_cast<double>(samples->histogram[i]) * kSampleWidths[i];
    return static_cast<int>(std::lround(bits / static_cast<double>(samples->samples)));
  }
  if (const auto* group = std::get_if<GroupFormat>(&format)) return group->bits;
  if (const auto* narrow = std::get_if<NarrowFormat>(&format))
    return 8 * static_cast<int>(code_bytes(*narrow));
  return 1;
}

at::Tensor allocate(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type,
                    const at::Device& device) {
  const auto key = device.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA;
  c10::Allocator* from = device.is_cpu() ? &reused_memory() : c10::GetAllocator(device.type());
  return at::Tensor(
      at::detail::empty_strided_generic(sizes, strides, from, c10::DispatchKeySet(key), type));
}

at::Tensor pack_payload(const void* source, const at::Device& device, const Format& format,
                        const Key& key, CodecMemory* memory) {
  const c10::DeviceGuard guard(device);
  const Execution execution = execution_on(device);
  const std::int64_t bytes = packed_bytes(format);
  at::Tensor payload = allocate({bytes}, {1}, at::kByte, device);
  const Packing to{source,    device,
                   key,       {payload.mutable_data_ptr(), static_cast<std::size_t>(bytes)},
                   execution, memory};
  check(std::visit([&](const auto& one) { return pack_with(one, to); }, format));
  if (const auto* samples = std::get_if<SampleFormat>(&format);
      samples && memory && memory->wants_scores) {
    const auto begin = static_cast<std::int64_t>(scores_offset(*samples));
    const at::Tensor scores =
        payload.slice(0, begin, begin + 4 * samples->samples).view(at::kFloat);
    memory->scores = memory->weights.defined() ? scores.mul(memory->weights) : scores.clone();
  }
  return payload;
}

at::Tensor pack_payload(const at::Tensor& source, const Format& format, const Key& key,
                        CodecMemory* memory) {
  TORCH_CHECK_VALUE(source.is_non_overlapping_and_dense(),
                    "backfold: tensor must be dense, got sizes ", source.sizes(), " with strides ",
                    source.strides());
  return pack_payload(source.const_data_ptr(), source.device(), format, key, memory);
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
  check(std::visit([&](const auto& one) { return unpack_with(one, from, result, execution); },
                   format));
  return result;
}

namespace {

// Normalised values share one scale, so fp32 can hold those of any type.
GroupFormat of_values(GroupFormat format) {
  format.type = ElementType::kF32;
  return format;
}

// What the core needs to normalise on its own; none for cases that it does not handle.
std::optional<RowAffine> row_affine(const GroupFormat& format, const Normalisation& by) {
  if (by.rows.run == 0 || by.rstd.scalar_type() != at::kFloat) return std::nullopt;
  const RowAffine rows{by.mean.defined() ? by.mean.const_data_ptr<float>() : nullptr,
                       by.rstd.const_data_ptr<float>(), by.rows.run, by.rows.count};
  return validate(format, rows).ok() ? std::optional(rows) : std::nullopt;
}

}  // namespace

at::Tensor pack_payload(const at::Tensor& source, const GroupFormat& format,
                        const Normalisation& by, const Key& key) {
  const auto rows = row_affine(format, by);
  if (!rows) return pack_payload(normalised(by, source), of_values(format), key);
  const c10::DeviceGuard guard(source.device());
  const std::int64_t bytes = packed_bytes(format);
  at::Tensor payload = allocate({bytes}, {1}, at::kByte, source.device());
  check(pack(format, *rows, source.const_data_ptr(), key,
             {payload.mutable_data_ptr(), static_cast<std::size_t>(bytes)},
             execution_on(source.device())));
  return payload;
}

at::Tensor unpack_payload(const at::Tensor& payload, const GroupFormat& format,
                          const Normalisation& by, at::ScalarType type) {
  if (const auto rows = row_affine(format, by)) {
    const c10::DeviceGuard guard(payload.device());
    at::Tensor result = allocate({format.count}, {1}, type, payload.device());
    check(unpack(format, *rows,
                 {payload.const_data_ptr(), static_cast<std::size_t>(payload.nbytes())},
                 result.mutable_data_ptr(), execution_on(payload.device())));
    return result;
  }
  const at::Tensor values =
      unpack_payload(payload, of_values(format), {format.count}, {1}, at::kFloat);
  return denormalised(by, values, type);
}

}  // namespace backfold::torch_layer
