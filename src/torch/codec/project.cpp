// SPDX-License-Identifier: Apache-2.0

#include "torch/codec/project.h"

#include <ATen/Functions.h>

#include <cmath>

#include "backfold/signs.h"
#include "torch/capture/undisturbed.h"
#include "torch/codec/codec.h"

namespace backfold::torch_layer {
namespace {

// The power of two that is nearest to 1 / sqrt(kept).
double size_of_entries(const ProjectFormat& format) {
  return std::exp2(std::round(-0.5 * std::log2(static_cast<double>(format.kept))));
}

// P, columns x kept.
at::Tensor projection(const ProjectFormat& format, const at::Device& device,
                      const Execution& execution) {
  const ElementType type = format.codes.type;
  const at::Tensor signs =
      allocate({format.columns, format.kept}, {format.kept, 1}, scalar_type(type), device);
  const auto size = static_cast<float>(size_of_entries(format));
  check(fill_signs(type, size, signs.numel(), format.key, signs.mutable_data_ptr(), execution));
  return signs;
}

}  // namespace

std::size_t packed_bytes(const ProjectFormat& format) {
  return backfold::packed_bytes(format.codes);
}

at::Tensor project(const ProjectFormat& format, const void* source, const at::Device& device,
                   const Execution& execution) {
  const Undisturbed undisturbed;
  const at::Tensor rows =
      at::from_blob(const_cast<void*>(source), {format.rows, format.columns},
                    at::TensorOptions(scalar_type(format.codes.type)).device(device));
  return at::mm(rows, projection(format, device, execution));
}

void project_back(const ProjectFormat& format, const at::Tensor& projected,
                  const at::Tensor& result, const Execution& execution) {
  const Undisturbed undisturbed;
  at::Tensor rows = result.as_strided({format.rows, format.columns}, {format.columns, 1});
  const double size = size_of_entries(format);
  at::addmm_out(rows, rows, projected, projection(format, result.device(), execution).t(),
                /*beta=*/0, /*alpha=*/1 / (static_cast<double>(format.kept) * size * size));
}

}  // namespace backfold::torch_layer
