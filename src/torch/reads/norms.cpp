// SPDX-License-Identifier: Apache-2.0

#include "torch/reads/norms.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "torch/capture/undisturbed.h"
#include "torch/store/geometry.h"

namespace backfold::torch_layer {
namespace {

using Rows = Norm::Rows;

constexpr Norm kNorms[] = {
    {"aten::native_layer_norm", "input", Rows::kNormalizedShape, 1, 2},
    {"aten::_fused_rms_norm", "input", Rows::kNormalizedShape, -1, 1},
    {"aten::native_group_norm", "input", Rows::kGroups, 1, 2},
    {"aten::native_batch_norm", "input", Rows::kChannels, 1, 2},
    {"aten::_native_batch_norm_legit", "input", Rows::kChannels, 1, 2},
    {"aten::_batch_norm_with_update", "input", Rows::kChannels, 1, 2},
    {"aten::cudnn_batch_norm", "input", Rows::kChannels, 1, 2},
    {"aten::miopen_batch_norm", "input", Rows::kChannels, 1, 2},

    // Written out by hand: x * rsqrt(mean(x^2)), x / norm(x), x / std(x).
    {"aten::pow", "self", Rows::kLast},
    {"aten::linalg_vector_norm", "self", Rows::kLast},
    {"aten::norm", "self", Rows::kLast},
    {"aten::var", "self", Rows::kLast},
    {"aten::var_mean", "self", Rows::kLast},
    {"aten::std", "self", Rows::kLast},
    {"aten::std_mean", "self", Rows::kLast},
    {"aten::div", "self", Rows::kLast},

    // Products, whose other factor is the gradient of each row.
    {"aten::addmm", "mat1", Rows::kLast, -1, -1, true},
    {"aten::mm", "self", Rows::kLast, -1, -1, true},
    {"aten::linear", "input", Rows::kLast, -1, -1, true},
};

bool is_cube(const Call& call) {
  const c10::IValue& exponent = call["exponent"];
  return exponent.isScalar() && exponent.toScalar().equal(3);
}

// The type that statistics are computed in.
at::ScalarType type_of_statistics(at::ScalarType type) {
  return type == at::kDouble ? at::kDouble : at::kFloat;
}

// Statistics, shaped to be broadcast over the axes of a tensor.
at::Tensor over_axes(const at::Tensor& table, const NormRows& rows) {
  c10::SmallVector<std::int64_t, 6> sizes, strides;
  for (const NormRows::Axis& axis : rows.axes) {
    sizes.push_back(axis.shared ? 1 : axis.size);
    strides.push_back(axis.shared ? 0 : axis.table_stride);
  }
  return table.as_strided(sizes, strides);
}

at::Tensor by_axes(const at::Tensor& tensor, const NormRows& rows) {
  c10::SmallVector<std::int64_t, 6> sizes, strides;
  for (const NormRows::Axis& axis : rows.axes) {
    sizes.push_back(axis.size);
    strides.push_back(axis.stride);
  }
  return tensor.as_strided(sizes, strides, tensor.storage_offset());
}

// A statistic from the operator's results, in memory order. It usually has that order already, and
// is then shared, not copied.
at::Tensor table_of(const at::Tensor& statistic, const NormRows& rows, at::ScalarType type) {
  c10::SmallVector<std::int64_t, 6> sizes, strides;
  for (const NormRows::Axis& axis : rows.axes) {
    if (axis.shared) continue;
    sizes.push_back(axis.size);
    strides.push_back(axis.table_stride);
  }
  bool in_order = true;
  std::int64_t stride = 1;
  for (std::size_t i = sizes.size(); i-- > 0;) {
    in_order = in_order && (sizes[i] == 1 || strides[i] == stride);
    stride *= sizes[i];
  }
  // Without history, which would be a cycle.
  if (in_order && statistic.scalar_type() == type && statistic.is_contiguous())
    return tensor_at(statistic.storage(), {{rows.count}, {1}, statistic.storage_offset()}, type);
  const at::Tensor given = statistic.tensor_data();
  at::Tensor table = at::empty({rows.count}, given.options().dtype(type));
  table.as_strided(sizes, strides).copy_(given.reshape(sizes));
  return table;
}

// Axes in memory order, outermost first, without those of size 1.
c10::SmallVector<std::size_t, 6> memory_order(const NormRows& rows) {
  c10::SmallVector<std::size_t, 6> order;
  for (std::size_t i = 0; i < rows.axes.size(); ++i)
    if (rows.axes[i].size > 1) order.push_back(i);
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return rows.axes[a].stride > rows.axes[b].stride;
  });
  return order;
}

void place_rows(NormRows& rows) {
  const auto order = memory_order(rows);
  rows.count = 1;
  std::int64_t inside = 1;  // elements inside of the innermost axis of rows
  bool seen = false, left = false, regular = true;
  for (auto at = order.rbegin(); at != order.rend(); ++at) {
    NormRows::Axis& axis = rows.axes[*at];
    if (axis.shared) {
      if (!seen) inside *= axis.size;
      left |= seen;
      continue;
    }
    seen = true;
    regular = regular && !left;
    axis.table_stride = rows.count;
    rows.count *= axis.size;
  }
  rows.run = regular ? inside : 0;
}

}  // namespace

const Norm* norm_of(std::string_view op, std::string_view slot) {
  const auto* found = std::find_if(std::begin(kNorms), std::end(kNorms), [&](const Norm& norm) {
    return norm.op == op && norm.slot == slot;
  });
  return found == std::end(kNorms) ? nullptr : found;
}

std::optional<NormCall> norm_call(const Norm& norm, const Call& call) {
  switch (norm.rows) {
    case Rows::kNormalizedShape:
      return NormCall{&norm,
                      static_cast<std::int64_t>(call["normalized_shape"].toListRef().size())};
    case Rows::kGroups:
      return NormCall{&norm, call["group"].toInt()};
    case Rows::kChannels: {
      const c10::IValue& training = call["training"];
      if (training.isBool() && !training.toBool()) return std::nullopt;
      return NormCall{&norm, 1};
    }
    case Rows::kLast:
      // No part of a norm, but of a GELU that is written out by hand.
      if (norm.op == "aten::pow" && is_cube(call)) return std::nullopt;
      return NormCall{&norm, 1};
  }
  return std::nullopt;
}

std::optional<NormRows> rows_of(const NormCall& call, const at::Tensor& dense) {
  if (dense.numel() == 0 || !dense.is_non_overlapping_and_dense()) return std::nullopt;
  return rows_of(call, dense.sizes(), dense.strides());
}

NormRows rows_of(const NormCall& call, at::IntArrayRef sizes, at::IntArrayRef strides) {
  NormRows rows;
  const auto dimensions = static_cast<std::int64_t>(sizes.size());
  for (std::int64_t i = 0; i < dimensions; ++i) {
    const auto at = static_cast<std::size_t>(i);
    NormRows::Axis axis{sizes[at], strides[at], false, 0};
    switch (call.norm->rows) {
      case Rows::kNormalizedShape:
      case Rows::kLast:
        axis.shared = i >= dimensions - call.count;
        break;
      case Rows::kChannels:
        axis.shared = i != 1;
        break;
      case Rows::kGroups:
        axis.shared = i > 1;
        if (i == 1) {
          const std::int64_t channels = axis.size / call.count;
          rows.axes.push_back({call.count, axis.stride * channels, false, 0});
          axis = {channels, axis.stride, true, 0};
        }
        break;
    }
    rows.axes.push_back(axis);
  }
  place_rows(rows);
  return rows;
}

bool has_few_values(const NormCall& call, const at::Tensor& tensor) {
  constexpr std::int64_t kFewest = 32;
  if (!call.has_statistics() || tensor.numel() == 0) return false;
  std::int64_t values = tensor.numel();
  switch (call.norm->rows) {
    case Rows::kNormalizedShape:
    case Rows::kLast:
      for (std::int64_t i = 0; i < tensor.dim() - call.count; ++i) values /= tensor.size(i);
      break;
    case Rows::kChannels:
      values /= tensor.size(1);
      break;
    case Rows::kGroups:
      values /= tensor.size(0) * call.count;
      break;
  }
  return values < kFewest;
}

bool mixes(const GroupFormat& format, const NormRows& rows) {
  if (rows.count == 1) return false;
  if (rows.run == 0) return true;
  if (format.layout == Layout::kStrided) return format.columns % (rows.run * rows.count) != 0;
  return rows.run % format.group != 0;
}

std::optional<Normalisation> normalisation_of(const NormCall& call, const NormRows& rows,
                                              c10::ArrayRef<c10::IValue> results) {
  const Undisturbed undisturbed;
  const auto statistic = [&](int which) {
    const auto index = static_cast<std::size_t>(which);
    return which >= 0 && index < results.size() && results[index].isTensor()
               ? results[index].toTensor()
               : at::Tensor();
  };
  const at::Tensor mean = statistic(call.norm->mean), rstd = statistic(call.norm->rstd);
  if (!rstd.defined() || rstd.numel() != rows.count) return std::nullopt;
  if (call.norm->mean >= 0 && (!mean.defined() || mean.numel() != rows.count)) return std::nullopt;
  const at::ScalarType type = type_of_statistics(rstd.scalar_type());
  return Normalisation{rows, mean.defined() ? table_of(mean, rows, type) : mean,
                       table_of(rstd, rows, type)};
}

Normalisation scale_of(const NormRows& rows, const at::Tensor& dense) {
  const Undisturbed undisturbed;
  c10::SmallVector<std::int64_t, 6> shared;
  for (std::size_t i = 0; i < rows.axes.size(); ++i)
    if (rows.axes[i].shared) shared.push_back(static_cast<std::int64_t>(i));
  const at::ScalarType type = type_of_statistics(dense.scalar_type());
  const at::Tensor largest = at::linalg_vector_norm(
      by_axes(dense, rows), std::numeric_limits<double>::infinity(), shared, false, type);
  // A row of zeros must come back as zeros, whatever the noise of its neighbours: if it is divided
  // by its norm, it has a gradient of 1e12 (padded windows of Swin V2). A row with an infinity has
  // no usable scale.
  constexpr double kForZeros = 0x1p120;
  const at::Tensor inverse = largest.reciprocal().clamp_max_(kForZeros);
  return {rows, {}, table_of(at::where(inverse > 0, inverse, 1), rows, type)};
}

at::Tensor normalised(const Normalisation& by, const at::Tensor& dense) {
  const Undisturbed undisturbed;
  at::Tensor values = at::empty_strided(dense.sizes(), dense.strides(),
                                        dense.options().dtype(by.rstd.scalar_type()));
  at::Tensor placed = by_axes(values, by.rows);
  if (by.mean.defined()) {
    at::sub_out(placed, by_axes(dense, by.rows), over_axes(by.mean, by.rows));
  } else {
    placed.copy_(by_axes(dense, by.rows));
  }
  placed.mul_(over_axes(by.rstd, by.rows));
  return values.to(at::kFloat);
}

void scale_errors(const Normalisation& by, at::Tensor& errors) {
  by_axes(errors, by.rows).mul_(over_axes(by.rstd, by.rows));
}

at::Tensor denormalised(const Normalisation& by, at::Tensor values, at::ScalarType type) {
  const Undisturbed undisturbed;
  values = values.to(by.rstd.scalar_type());
  at::Tensor placed = by_axes(values, by.rows);
  placed.mul_(over_axes(by.rstd.reciprocal(), by.rows));
  if (by.mean.defined()) placed.add_(over_axes(by.mean, by.rows));
  // Finite values stay finite, as in the kernels.
  if (type == at::kHalf) values.clamp_(-65504, 65504);
  return values.to(type);
}

}  // namespace backfold::torch_layer
