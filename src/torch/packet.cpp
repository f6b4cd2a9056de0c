// SPDX-License-Identifier: Apache-2.0

#include "torch/packet.h"

#include <ATen/core/grad_mode.h>

#include <sstream>

namespace backfold::torch_layer {
namespace {

Layout layout_named(std::string_view name) {
  if (name == "flat") return Layout::kFlat;
  if (name == "strided") return Layout::kStrided;
  if (name == "rotated") return Layout::kRotated;
  TORCH_CHECK_VALUE(false, "backfold: layout must be 'flat', 'strided' or 'rotated', got '",
                    std::string(name), "'");
}

}  // namespace

GroupFormat format_for(at::ScalarType type, at::IntArrayRef sizes, at::IntArrayRef strides,
                       const PackOptions& options) {
  GroupFormat format;
  const auto element = element_type(type);
  TORCH_CHECK_TYPE(element && *element <= ElementType::kF64,
                   "backfold: tensor must be float32, float16, bfloat16 or float64, got ", type);
  format.type = *element;
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
