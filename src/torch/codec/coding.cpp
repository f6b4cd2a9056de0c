// SPDX-License-Identifier: Apache-2.0

#include "torch/codec/coding.h"

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <sstream>

namespace backfold::torch_layer {
namespace {

template <typename... Parts>
Misfit misfit(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return {out.str()};
}

Misfit too_small(const at::Tensor& tensor, const Status& status) {
  Misfit found = misfit("cannot be used for ", tensor.sizes(), ": ", status.message());
  found.only_small = true;
  return found;
}

// Dimensions in memory order, outermost first, without those of size 1.
c10::SmallVector<std::int64_t, 5> memory_order(const at::Tensor& tensor) {
  c10::SmallVector<std::int64_t, 5> order;
  for (std::int64_t d = 0; d < tensor.dim(); ++d)
    if (tensor.size(d) != 1) order.push_back(d);
  std::sort(order.begin(), order.end(),
            [&](std::int64_t a, std::int64_t b) { return tensor.stride(a) > tensor.stride(b); });
  return order;
}

ElementType type_of(const at::Tensor& tensor) { return *element_type(tensor.scalar_type()); }

Coding pooled(int block, int bits, const at::Tensor& tensor, const Saver& saver) {
  const std::int64_t dim = tensor.dim();
  if (dim < 3 || dim > 5) return misfit("takes tensors of 3 to 5 dimensions, got ", tensor.sizes());
  // Positions are the last dimensions of (batch, channels, positions...). A sequence outside of a
  // convolution is (batch, positions, channels).
  const bool sequence = dim == 3 && saver.op != "aten::convolution";
  const auto is_pooled = [&](std::int64_t d) { return sequence ? d == 1 : d >= 2; };
  PoolFormat format{.type = type_of(tensor), .block = block, .bits = bits, .outer = 1};
  c10::SmallVector<std::int64_t, 3> positions;
  bool inner = false;
  for (const std::int64_t d : memory_order(tensor)) {
    const std::int64_t size = tensor.size(d);
    if (is_pooled(d)) {
      if (inner)
        return misfit("takes positions that are adjacent in memory, got strides ",
                      tensor.strides());
      positions.push_back(size);
    } else {
      inner |= !positions.empty();
      (positions.empty() ? format.outer : format.inner) *= size;
    }
  }
  while (positions.size() < 3) positions.insert(positions.begin(), 1);
  format.depth = positions[0];
  format.height = positions[1];
  format.width = positions[2];
  if (const Status status = validate(format); !status.ok()) return too_small(tensor, status);
  return Format(format);
}

// Numbers of samples from shares, rounded such that they add up to all samples: those with the
// largest remainders are rounded up.
std::array<std::int64_t, 8> counts_of(const std::array<double, 8>& shares, std::int64_t samples) {
  std::array<std::int64_t, 8> counts{};
  std::array<std::size_t, 8> order{};
  std::iota(order.begin(), order.end(), 0);
  std::int64_t left = samples;
  for (std::size_t i = 0; i < shares.size(); ++i) {
    counts[i] = static_cast<std::int64_t>(shares[i] * static_cast<double>(samples));
    left -= counts[i];
  }
  const auto remainder = [&](std::size_t i) {
    return shares[i] * static_cast<double>(samples) - static_cast<double>(counts[i]);
  };
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return remainder(a) > remainder(b); });
  for (std::size_t i = 0; left > 0; i = (i + 1) % order.size(), --left) ++counts[order[i]];
  return counts;
}

Coding per_sample(int bits, const at::Tensor& tensor, const Saver& saver) {
  if (tensor.dim() < 2 || tensor.size(0) < 2)
    return misfit("takes tensors whose first dimension is a batch of 2 or more samples, got ",
                  tensor.sizes());
  if (tensor.stride(0) * tensor.size(0) != tensor.numel())
    return misfit("takes samples that are contiguous in memory, got strides ", tensor.strides());
  std::array<double, 8> shares = saver.shares;
  if (std::accumulate(shares.begin(), shares.end(), 0.0) == 0)
    shares[static_cast<std::size_t>(std::find(kSampleWidths.begin(), kSampleWidths.end(), bits) -
                                    kSampleWidths.begin())] = 1;
  SampleFormat format{.type = type_of(tensor),
                      .samples = tensor.size(0),
                      .per_sample = tensor.numel() / tensor.size(0),
                      .histogram = counts_of(shares, tensor.size(0))};
  if (const Status status = validate(format); !status.ok()) return too_small(tensor, status);
  return Format(format);
}

Coding projected(const codecs::Project& codec, const at::Tensor& tensor, const Key& key) {
  const auto order = memory_order(tensor);
  const std::int64_t columns = order.empty() ? 1 : tensor.size(order.back());
  if (columns < 2 * codec.ratio)
    return misfit("takes a last dimension of ", 2 * codec.ratio, " or more, got ", tensor.sizes());
  ProjectFormat format;
  format.columns = columns;
  format.rows = tensor.numel() / columns;
  format.kept = columns / codec.ratio;
  if (format.rows < format.kept) {
    // The matrix of signs would be larger than the tensor.
    Misfit found = misfit("takes ", format.kept, " or more rows for a last dimension of ", columns,
                          ", got ", tensor.sizes());
    found.only_small = true;
    return found;
  }
  format.codes = {.type = type_of(tensor), .bits = codec.bits, .count = format.rows * format.kept};
  format.key = key;
  if (const Status status = validate(format.codes); !status.ok()) return too_small(tensor, status);
  return Format(format);
}

Coding ranged(const codecs::RunningRange& codec, const at::Tensor& tensor) {
  if (tensor.dim() < 2)
    return misfit("takes tensors of 2 or more dimensions, got ", tensor.sizes());
  // Channels of a map, or heads; for a sequence or a matrix, the last dimension.
  const std::int64_t channel = tensor.dim() >= 4 ? 1 : tensor.dim() - 1;
  RangedFormat format{
      .type = type_of(tensor), .bits = codec.bits, .outer = 1, .channels = 1, .inner = 1};
  bool inner = false;
  for (const std::int64_t d : memory_order(tensor)) {
    if (d == channel) {
      format.channels = tensor.size(d);
      inner = true;
    } else {
      (inner ? format.inner : format.outer) *= tensor.size(d);
    }
  }
  return Format(format);
}

Coding tabulated(const codecs::FewBit& codec, const at::Tensor& tensor, const Saver& saver) {
  const bool gelu = saver.op == "aten::gelu";
  if (!gelu && saver.op != "aten::silu")
    return misfit("takes tensors saved by aten::gelu and aten::silu, got one saved by ",
                  saver.op.empty() ? std::string_view("no operator") : saver.op);
  const Activation activation = !gelu        ? Activation::kSilu
                                : saver.tanh ? Activation::kGeluTanh
                                             : Activation::kGelu;
  TableFormat format;
  check(derivative_table(activation, codec.bits, type_of(tensor), tensor.numel(), &format));
  return Format(format);
}

}  // namespace

Coding coding_for(const Codec& codec, const at::Tensor& tensor, const Saver& saver,
                  const Key& key) {
  if (!tensor.is_floating_point())
    return misfit("takes floating-point tensors, got ", tensor.scalar_type());
  struct Make {
    const at::Tensor& tensor;
    const Saver& saver;
    const Key& key;
    Coding operator()(const codecs::Quantize& one) const {
      if (one.per_sample) return per_sample(one.bits, tensor, saver);
      return Format(
          GroupFormat{.type = type_of(tensor), .bits = one.bits, .count = tensor.numel()});
    }
    Coding operator()(const codecs::Pool& one) const { return pooled(one.block, 0, tensor, saver); }
    Coding operator()(const codecs::PoolResidual& one) const {
      return pooled(one.block, one.bits, tensor, saver);
    }
    Coding operator()(const codecs::Project& one) const { return projected(one, tensor, key); }
    Coding operator()(const codecs::RunningRange& one) const { return ranged(one, tensor); }
    Coding operator()(const codecs::FewBit& one) const { return tabulated(one, tensor, saver); }
    Coding operator()(const codecs::Exact&) const { return misfit("keeps no packet"); }
    Coding operator()(const codecs::Keep&) const { return misfit("keeps no packet"); }
  };
  return std::visit(Make{tensor, saver, key}, codec);
}

}  // namespace backfold::torch_layer
