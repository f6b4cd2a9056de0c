// SPDX-License-Identifier: Apache-2.0
//
// Tensors of which backward reads only sizes, strides, type or device, or nothing at all.
// Autograd's code generator saves plain sizes if a formula shows that they suffice; these are the
// formulas that pass the tensor itself to a kernel or a helper.

#include <ATen/core/Tensor.h>

#include <string_view>

#include "torch/reads/exact_ops_rows.h"

namespace backfold::torch_layer {
namespace {

constexpr std::string_view kSizes = "backward reads only its sizes";

constexpr Rule geometry(std::string_view op, std::string_view slot, std::string_view nodes) {
  return {.op = op, .slot = slot, .reads = Reads::kGeometry, .reason = kSizes, .nodes = nodes};
}

// Sums and means route the gradient by the index alone; other reductions compare and divide.
bool sums(const Call& call, const at::Tensor&) {
  const c10::IValue& reduce = call["reduce"];
  return reduce.isString() && (reduce.toStringRef() == "sum" || reduce.toStringRef() == "mean");
}

constexpr Rule geometry_of_sums(std::string_view op, std::string_view slot,
                                std::string_view nodes) {
  Rule rule = geometry(op, slot, nodes);
  rule.when = sums;
  return rule;
}

constexpr Rule kGeometryRows[] = {
    geometry("aten::max_pool2d_with_indices", "self", "MaxPool2DWithIndicesBackward0"),
    geometry("aten::max_pool3d_with_indices", "self", "MaxPool3DWithIndicesBackward0"),
    geometry("aten::adaptive_max_pool2d", "self", "AdaptiveMaxPool2DBackward0"),
    geometry("aten::adaptive_max_pool3d", "self", "AdaptiveMaxPool3DBackward0"),
    geometry("aten::fractional_max_pool2d", "self", "FractionalMaxPool2DBackward0"),
    geometry("aten::fractional_max_pool3d", "self", "FractionalMaxPool3DBackward0"),
    geometry("aten::avg_pool2d", "self", "AvgPool2DBackward0"),
    geometry("aten::avg_pool3d", "self", "AvgPool3DBackward0"),
    geometry("aten::_adaptive_avg_pool2d", "self", "AdaptiveAvgPool2DBackward0"),
    geometry("aten::_adaptive_avg_pool3d", "self", "AdaptiveAvgPool3DBackward0"),
    geometry("aten::reflection_pad1d", "self", "ReflectionPad1DBackward0"),
    geometry("aten::reflection_pad2d", "self", "ReflectionPad2DBackward0"),
    geometry("aten::reflection_pad3d", "self", "ReflectionPad3DBackward0"),
    geometry("aten::replication_pad1d", "self", "ReplicationPad1DBackward0"),
    geometry("aten::replication_pad2d", "self", "ReplicationPad2DBackward0"),
    geometry("aten::replication_pad3d", "self", "ReplicationPad3DBackward0"),
    geometry("aten::nll_loss_forward", "self", "NllLossBackward0"),
    geometry("aten::nll_loss2d_forward", "self", "NllLoss2DBackward0"),
    geometry("aten::gather", "self", "GatherBackward0"),
    geometry("aten::index_add", "source", "IndexAddBackward0"),
    geometry("aten::index_add_", "source", "IndexAddBackward0"),
    geometry("aten::index_copy", "source", "IndexCopyBackward0"),
    geometry("aten::index_copy_", "source", "IndexCopyBackward0"),
    geometry("aten::take", "self", "TakeBackward0"),
    geometry("aten::put", "source", "PutBackward0"),
    geometry("aten::put_", "source", "PutBackward0"),
    geometry("aten::masked_select", "self", "MaskedSelectBackward0"),
    geometry("aten::cummax", "self", "CummaxBackward0"),
    geometry("aten::cummin", "self", "CumminBackward0"),
    geometry("aten::complex", "real", "ComplexBackward0"),
    geometry("aten::complex", "imag", "ComplexBackward0"),
    geometry("aten::_fft_r2c", "self", "FftR2CBackward0"),
    geometry_of_sums("aten::scatter_reduce", "self", "ScatterReduceBackward0"),
    geometry_of_sums("aten::scatter_reduce", "src", "ScatterReduceBackward0"),
    geometry_of_sums("aten::scatter_reduce", "result", "ScatterReduceBackward0"),
    geometry_of_sums("aten::scatter_reduce_", "src", "ScatterReduceBackward0"),
};

}  // namespace

c10::ArrayRef<Rule> geometry_rules() { return kGeometryRows; }

}  // namespace backfold::torch_layer
