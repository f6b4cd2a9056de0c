// SPDX-License-Identifier: Apache-2.0

#include "torch/codec/grouping.h"

#include <algorithm>

#include "torch/store/geometry.h"

namespace backfold::torch_layer {
namespace {

constexpr std::int64_t kGroup = 128;

// The number of elements in memory, and in a row of the `inner` innermost dimensions; 0 if no
// dimension is left for groups to run along.
struct Shape {
  std::int64_t count = 1;
  std::array<std::int64_t, 3> row = {0, 0, 0};  // by `inner`
};

Shape shape_of(const at::Tensor& tensor) {
  c10::SmallVector<std::pair<std::int64_t, std::int64_t>, 5> dimensions;  // stride, size
  Shape shape;
  for (std::int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.stride(i) == 0 || tensor.size(i) == 1) continue;
    dimensions.emplace_back(tensor.stride(i), tensor.size(i));
    shape.count *= tensor.size(i);
  }
  std::sort(dimensions.begin(), dimensions.end());
  std::int64_t row = 1;
  for (std::size_t inner = 1; inner <= 2 && inner < dimensions.size(); ++inner) {
    row *= dimensions[inner - 1].second;
    shape.row[inner] = row;
  }
  return shape;
}

std::int64_t rounded_up(std::int64_t count) { return (count + kGroup - 1) / kGroup; }

std::int64_t groups_in(const Shape& shape, const Grouping& grouping) {
  const std::int64_t flat = rounded_up(shape.count);
  if (grouping.layout != Layout::kStrided) return flat;
  const std::int64_t row = shape.row[static_cast<std::size_t>(grouping.inner)];
  if (row == 0) return 0;
  const std::int64_t groups = row * rounded_up(shape.count / row);
  return groups <= flat + flat / 20 ? groups : 0;
}

}  // namespace

bool is_width(double bits) {
  return std::find(kCodeWidths.begin(), kCodeWidths.end(), bits) != kCodeWidths.end();
}

int widest_within(double bits) {
  int widest = kCodeWidths.front();
  for (const int width : kCodeWidths)
    if (width <= bits) widest = width;
  return widest;
}

std::string name_of(const Grouping& grouping) {
  switch (grouping.layout) {
    case Layout::kFlat:
      return "flat";
    case Layout::kRotated:
      return "rotated";
    case Layout::kStrided:
      return "strided " + std::to_string(grouping.inner);
  }
  return "unknown";
}

std::optional<Grouping> grouping_named(const std::string& name) {
  for (const Grouping& grouping : kGroupings)
    if (name_of(grouping) == name) return grouping;
  return std::nullopt;
}

double relative_time(Layout layout, c10::DeviceType device) {
  // GPUs pack in any layout at nearly the speed of a copy. For CPUs these lie between AVX2 and
  // AVX-512, in cache and in memory, fp32 at 4 bits (bench/run cpu --only /4/fp32).
  const bool cpu = device == c10::DeviceType::CPU;
  switch (layout) {
    case Layout::kFlat:
      return 1;
    case Layout::kStrided:
      return cpu ? 1.5 : 1.05;
    case Layout::kRotated:
      return cpu ? 2.0 : 1.05;
  }
  return 1;
}

std::array<std::int64_t, kGroupings.size()> groups_of(const at::Tensor& tensor) {
  const Shape shape = shape_of(tensor);
  std::array<std::int64_t, kGroupings.size()> groups{};
  for (std::size_t i = 0; i < kGroupings.size(); ++i) groups[i] = groups_in(shape, kGroupings[i]);
  return groups;
}

std::int64_t bytes_of_groups(int bits, std::int64_t groups, std::int64_t packets) {
  constexpr auto kPadding = static_cast<std::int64_t>(kPayloadAlignment) - 4;  // of the headers
  return groups * (4 + kGroup * bits / 8) + packets * kPadding;
}

GroupFormat group_format(const at::Tensor& tensor, ElementType type, const Choice& choice,
                         bool zero_exact) {
  GroupFormat format{.type = type, .bits = choice.bits, .zero_exact = zero_exact};
  if (choice.grouping.layout == Layout::kRotated && !zero_exact) format.layout = Layout::kRotated;
  if (choice.grouping.layout == Layout::kStrided) {
    const Shape shape = shape_of(tensor);
    if (groups_in(shape, choice.grouping) > 0) {
      format.layout = Layout::kStrided;
      format.columns = shape.row[static_cast<std::size_t>(choice.grouping.inner)];
    }
  }
  return format;
}

at::Tensor round_trip(const at::Tensor& tensor, Format format, const Key& key) {
  const Span span = span_of(tensor);
  const bool in_place = fills_its_span(tensor, span);
  const at::Tensor copy = in_place ? at::Tensor() : without_gaps(tensor);
  const std::int64_t count = in_place ? span.count : copy.numel();
  set_count(format, count);
  const auto* begin = in_place ? static_cast<const char*>(tensor.storage().data()) +
                                     span.begin * static_cast<std::int64_t>(tensor.element_size())
                               : static_cast<const char*>(copy.const_data_ptr());
  const at::Tensor payload = pack_payload(begin, tensor.device(), format, key);
  const at::Tensor decoded = unpack_payload(payload, format, {count}, {1}, tensor.scalar_type());
  return tensor_at(decoded.storage(),
                   in_place ? view_in_span(tensor, span.begin) : view_in_copy(tensor, copy),
                   tensor.scalar_type());
}

at::Tensor round_trip(const at::Tensor& tensor, GroupFormat format, const Key& key,
                      const std::optional<Normalisation>& by) {
  if (!by || !mixes(format, by->rows)) return round_trip(tensor, Format(format), key);
  const bool dense = tensor.is_non_overlapping_and_dense();
  const at::Tensor source = dense ? tensor : without_gaps(tensor);
  format.count = source.numel();
  if (format.layout == Layout::kRotated) format.layout = Layout::kFlat;
  const at::Tensor payload = pack_payload(source, format, *by, key);
  const at::Tensor decoded = unpack_payload(payload, format, *by, tensor.scalar_type());
  return tensor_at(
      decoded.storage(),
      dense ? view_in_span(tensor, tensor.storage_offset()) : view_in_copy(tensor, source),
      tensor.scalar_type());
}

}  // namespace backfold::torch_layer
