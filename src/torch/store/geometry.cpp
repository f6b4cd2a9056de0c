// SPDX-License-Identifier: Apache-2.0

#include "torch/store/geometry.h"

#include <ATen/Functions.h>

namespace backfold::torch_layer {
namespace {

// Elements with an address of their own, but for overlaps: dimensions of stride 0 count once.
std::int64_t distinct_elements(const at::Tensor& tensor) {
  std::int64_t count = 1;
  for (std::int64_t i = 0; i < tensor.dim(); ++i)
    if (tensor.stride(i) != 0 || tensor.size(i) == 0) count *= tensor.size(i);
  return count;
}

}  // namespace

Span span_of(const View& view) {
  std::int64_t last = 0;
  for (std::size_t i = 0; i < view.sizes.size(); ++i) {
    if (view.sizes[i] == 0) return {view.offset, 0};
    last += (view.sizes[i] - 1) * view.strides[i];
  }
  return {view.offset, last + 1};
}

std::int64_t bytes_of(const View& view, at::ScalarType type) {
  return c10::multiply_integers(view.sizes) * static_cast<std::int64_t>(c10::elementSize(type));
}

View without_repeats(View view) {
  for (std::size_t i = 0; i < view.sizes.size(); ++i)
    if (view.strides[i] == 0) view.sizes[i] = 1;
  return view;
}

Span span_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return {tensor.storage_offset(), 0};
  if (tensor.is_non_overlapping_and_dense()) return {tensor.storage_offset(), tensor.numel()};
  std::int64_t last = 0;
  for (std::int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return {tensor.storage_offset(), last + 1};
}

bool fills_its_span(const at::Tensor& tensor, const Span& span) {
  return span.count == tensor.numel() || span.count <= distinct_elements(tensor);
}

at::Tensor without_gaps(const at::Tensor& tensor) {
  c10::SmallVector<std::int64_t, 5> sizes(tensor.sizes().begin(), tensor.sizes().end());
  for (std::size_t i = 0; i < sizes.size(); ++i)
    if (tensor.stride(i) == 0 && sizes[i] > 1) sizes[i] = 1;
  return tensor.as_strided(sizes, tensor.strides()).clone(at::MemoryFormat::Preserve);
}

bool same_elements(const at::Tensor& a, const at::Tensor& b) {
  return a.is_alias_of(b) && a.sizes() == b.sizes() && a.strides() == b.strides() &&
         a.storage_offset() == b.storage_offset();
}

View view_in_span(const at::Tensor& tensor, std::int64_t begin) {
  View view;
  view.sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
  view.strides.assign(tensor.strides().begin(), tensor.strides().end());
  view.offset = tensor.storage_offset() - begin;
  return view;
}

View view_in_copy(const at::Tensor& tensor, const at::Tensor& copy) {
  View view;
  view.sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
  view.strides.assign(copy.strides().begin(), copy.strides().end());
  for (std::size_t i = 0; i < view.sizes.size(); ++i)
    if (tensor.stride(i) == 0) view.strides[i] = 0;
  return view;
}

at::Tensor tensor_at(c10::Storage storage, const View& view, at::ScalarType type) {
  const auto key = storage.device().is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA;
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key), c10::scalarTypeToTypeMeta(type));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(view.sizes, view.strides, view.offset);
  return tensor;
}

at::Tensor bytes_in(c10::Storage storage) {
  const View all{{static_cast<std::int64_t>(storage.nbytes())}, {1}, 0};
  return tensor_at(std::move(storage), all, at::kByte);
}

}  // namespace backfold::torch_layer
