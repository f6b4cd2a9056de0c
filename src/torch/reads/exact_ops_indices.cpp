// SPDX-License-Identifier: Apache-2.0
//
// Integers that the operator itself keeps within a bound: it made them, or it rejects others (the
// CPU raises an error, CUDA asserts). Integers without a row are kept unchanged.

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "torch/reads/exact_ops_rows.h"

namespace backfold::torch_layer {
namespace {

bool between(std::int64_t low, std::int64_t high, Bound* bound) {
  if (low > high) return false;
  *bound = Bound{low, high, false, 0};
  return true;
}

bool has_sizes(const c10::IValue& value) {
  if (!value.isTensor() || !value.toTensor().defined() || value.toTensor().is_nested())
    return false;
  return !value.toTensor().unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

// The size along a dimension, which counts from the end if negative; 1 for a 0-dimensional tensor.
bool read_size(const c10::IValue& tensor, const c10::IValue& dim, std::int64_t* size) {
  if (!has_sizes(tensor) || !dim.isInt()) return false;
  const at::IntArrayRef sizes = tensor.toTensor().sizes();
  const std::int64_t count = static_cast<std::int64_t>(sizes.size());
  if (count == 0) {
    *size = 1;
    return true;
  }
  const std::int64_t at = dim.toInt() < 0 ? dim.toInt() + count : dim.toInt();
  if (at < 0 || at >= count) return false;
  *size = sizes[at];
  return true;
}

bool along_dim(const Call& call, Bound* bound) {
  std::int64_t size;
  return read_size(call["self"], call["dim"], &size) && between(0, size - 1, bound);
}

bool along_dim_or_negative(const Call& call, Bound* bound) {
  std::int64_t size;
  return read_size(call["self"], call["dim"], &size) && between(-size, size - 1, bound);
}

bool in_tensor_or_negative(const Call& call, Bound* bound) {
  if (!has_sizes(call["self"])) return false;
  const std::int64_t count = call["self"].toTensor().numel();
  return between(-count, count - 1, bound);
}

// self[indices]: the dimension that an entry indexes depends on all entries, so the largest size
// bounds each of them.
bool in_any_dim_or_negative(const Call& call, Bound* bound) {
  if (!has_sizes(call["self"])) return false;
  if (call["unsafe"].isBool() && call["unsafe"].toBool()) return false;
  std::int64_t largest = 0;
  for (const std::int64_t size : call["self"].toTensor().sizes()) {
    largest = std::max(largest, size);
  }
  return between(-largest, largest - 1, bound);
}

// Positions in the last `dims` dimensions of self, flattened.
bool in_plane(const Call& call, int dims, Bound* bound) {
  if (!has_sizes(call["self"])) return false;
  const at::IntArrayRef sizes = call["self"].toTensor().sizes();
  if (sizes.size() < static_cast<std::size_t>(dims)) return false;
  std::int64_t count = 1;
  for (const std::int64_t size : sizes.slice(sizes.size() - dims)) count *= size;
  return between(0, count - 1, bound);
}

bool in_plane_2d(const Call& call, Bound* bound) { return in_plane(call, 2, bound); }
bool in_plane_3d(const Call& call, Bound* bound) { return in_plane(call, 3, bound); }

// Positions in the plane that max_unpool makes.
bool in_output_plane(const Call& call, Bound* bound) {
  if (!call["output_size"].isIntList()) return false;
  std::int64_t count = 1;
  for (const std::int64_t size : call["output_size"].toIntVector()) count *= size;
  return between(0, count - 1, bound);
}

bool weight_row(const Call& call, Bound* bound) {
  std::int64_t rows;
  return read_size(call["weight"], std::int64_t{0}, &rows) && between(0, rows - 1, bound);
}

// embedding_bag's offset2bag: the bag of each index.
bool bag(const Call& call, Bound* bound) {
  if (!has_sizes(call["offsets"])) return false;
  return between(0, call["offsets"].toTensor().numel() - 1, bound);
}

// embedding_bag's max_indices: the row that each element came from, -1 in an empty bag. Modes other
// than max (2) leave them unset.
bool weight_row_of_max(const Call& call, Bound* bound) {
  if (!call["mode"].isInt() || call["mode"].toInt() != 2 || !weight_row(call, bound)) return false;
  bound->low = -1;
  return true;
}

bool class_number(const Call& call, std::int64_t dim, Bound* bound) {
  std::int64_t classes;
  if (!read_size(call["self"], dim, &classes) || !between(0, classes - 1, bound)) return false;
  const c10::IValue& ignored = call["ignore_index"];
  if (!ignored.isInt()) return false;
  bound->sentinel = ignored.toInt();
  bound->has_sentinel = bound->sentinel < bound->low || bound->sentinel > bound->high;
  return true;
}

bool nll_target(const Call& call, Bound* bound) { return class_number(call, -1, bound); }
bool nll2d_target(const Call& call, Bound* bound) { return class_number(call, 1, bound); }

bool margin_target(const Call& call, Bound* bound) {
  std::int64_t classes;
  return read_size(call["self"], std::int64_t{-1}, &classes) && between(0, classes - 1, bound);
}

// -1 ends a row's list of labels.
bool multilabel_target(const Call& call, Bound* bound) {
  if (!margin_target(call, bound)) return false;
  bound->low = -1;
  return true;
}

constexpr Rule indices(std::string_view op, std::string_view slot,
                       bool (*bound)(const Call&, Bound*), std::string_view nodes,
                       std::string_view reason) {
  return {.op = op,
          .slot = slot,
          .reads = Reads::kIndices,
          .reason = reason,
          .nodes = nodes,
          .bound = bound};
}

constexpr std::string_view kPosition = "positions along one dimension";
constexpr std::string_view kPlane = "positions in a plane";
constexpr std::string_view kRow = "rows of the weight";
constexpr std::string_view kClass = "class numbers";
constexpr std::string_view kBag = "numbers of bags";
constexpr std::string_view kElement = "positions in a tensor";

bool is_integral(const Call&, const at::Tensor& saved) {
  return c10::isIntegralType(saved.scalar_type(), /*includeBool=*/false);
}

// For reductions that save indices if they run along a dimension, but values if over all elements.
constexpr Rule indices_if_integral(std::string_view op, std::string_view nodes) {
  Rule rule = indices(op, "result", along_dim, nodes, kPosition);
  rule.when = is_integral;
  return rule;
}

constexpr Rule kIndexRows[] = {
    // Made by the operator.
    indices_if_integral("aten::max", "MaxBackward0"),
    indices_if_integral("aten::min", "MinBackward0"),
    indices_if_integral("aten::median", "MedianBackward1"),
    indices_if_integral("aten::nanmedian", "NanmedianBackward1"),
    indices("aten::mode", "result", along_dim, "ModeBackward0", kPosition),
    indices("aten::kthvalue", "result", along_dim, "KthvalueBackward0", kPosition),
    indices("aten::topk", "result", along_dim, "TopkBackward0", kPosition),
    indices("aten::sort", "result", along_dim, "SortBackward0 SortBackward1", kPosition),
    indices("aten::cummax", "result", along_dim, "CummaxBackward0", kPosition),
    indices("aten::cummin", "result", along_dim, "CumminBackward0", kPosition),
    indices("aten::max_pool2d_with_indices", "result", in_plane_2d, "MaxPool2DWithIndicesBackward0",
            kPlane),
    indices("aten::max_pool3d_with_indices", "result", in_plane_3d, "MaxPool3DWithIndicesBackward0",
            kPlane),
    indices("aten::adaptive_max_pool2d", "result", in_plane_2d, "AdaptiveMaxPool2DBackward0",
            kPlane),
    indices("aten::adaptive_max_pool3d", "result", in_plane_3d, "AdaptiveMaxPool3DBackward0",
            kPlane),
    indices("aten::fractional_max_pool2d", "result", in_plane_2d, "FractionalMaxPool2DBackward0",
            kPlane),
    indices("aten::fractional_max_pool3d", "result", in_plane_3d, "FractionalMaxPool3DBackward0",
            kPlane),

    // Given to the operator, which rejects negative ones.
    indices("aten::gather", "index", along_dim, "GatherBackward0", kPosition),
    indices("aten::scatter", "index", along_dim, "ScatterBackward0 ScatterBackward1", kPosition),
    indices("aten::scatter_", "index", along_dim, "ScatterBackward0 ScatterBackward1", kPosition),
    indices("aten::scatter_add", "index", along_dim, "ScatterAddBackward0", kPosition),
    indices("aten::scatter_add_", "index", along_dim, "ScatterAddBackward0", kPosition),
    indices("aten::scatter_reduce", "index", along_dim, "ScatterReduceBackward0", kPosition),
    indices("aten::scatter_reduce_", "index", along_dim, "ScatterReduceBackward0", kPosition),
    indices("aten::index_select", "index", along_dim, "IndexSelectBackward0", kPosition),
    indices("aten::index_add", "index", along_dim, "IndexAddBackward0", kPosition),
    indices("aten::index_add_", "index", along_dim, "IndexAddBackward0", kPosition),
    indices("aten::index_copy", "index", along_dim, "IndexCopyBackward0", kPosition),
    indices("aten::index_copy_", "index", along_dim, "IndexCopyBackward0", kPosition),
    indices("aten::index_reduce", "index", along_dim, "IndexReduceBackward0", kPosition),
    indices("aten::index_reduce_", "index", along_dim, "IndexReduceBackward0", kPosition),
    indices("aten::max_unpool2d", "indices", in_output_plane, "MaxUnpool2DBackward0", kPlane),
    indices("aten::max_unpool3d", "indices", in_output_plane, "MaxUnpool3DBackward0", kPlane),
    indices("aten::embedding", "indices", weight_row, "EmbeddingBackward0", kRow),
    indices("aten::_embedding_bag", "indices", weight_row, "EmbeddingBagBackward0", kRow),
    indices("aten::_embedding_bag", "result.0", bag, "EmbeddingBagBackward0", kBag),
    indices("aten::_embedding_bag", "result.2", weight_row_of_max, "EmbeddingBagBackward0", kRow),
    indices("aten::nll_loss_forward", "target", nll_target, "NllLossBackward0", kClass),
    indices("aten::nll_loss2d_forward", "target", nll2d_target, "NllLoss2DBackward0", kClass),
    indices("aten::multi_margin_loss", "target", margin_target, "MultiMarginLossBackward0", kClass),
    indices("aten::multilabel_margin_loss_forward", "target", multilabel_target,
            "MultilabelMarginLossBackward0", kClass),

    // Given to the operator, which counts negative ones from the end.
    indices("aten::index", "indices", in_any_dim_or_negative, "IndexBackward0", kPosition),
    indices("aten::index_put", "indices", in_any_dim_or_negative, "IndexPutBackward0", kPosition),
    indices("aten::index_put_", "indices", in_any_dim_or_negative, "IndexPutBackward0", kPosition),
    indices("aten::_index_put_impl_", "indices", in_any_dim_or_negative, "IndexPutImplBackward0",
            kPosition),
    indices("aten::index_fill", "index", along_dim_or_negative,
            "IndexFillBackward0 IndexFillBackward1", kPosition),
    indices("aten::index_fill_", "index", along_dim_or_negative,
            "IndexFillBackward0 IndexFillBackward1", kPosition),
    indices("aten::take", "index", in_tensor_or_negative, "TakeBackward0", kElement),
    indices("aten::put", "index", in_tensor_or_negative, "PutBackward0", kElement),
    indices("aten::put_", "index", in_tensor_or_negative, "PutBackward0", kElement),
};

}  // namespace

c10::ArrayRef<Rule> index_rules() { return kIndexRows; }

}  // namespace backfold::torch_layer
