// SPDX-License-Identifier: Apache-2.0

#include "torch/packet.h"

#include <ATen/core/grad_mode.h>

#include <sstream>

#include "torch/codec/coding.h"

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

Packet::Packet(const at::Tensor& source)
    : type_(source.scalar_type()),
      source_bytes_(source.numel() * static_cast<std::int64_t>(source.element_size())) {
  TORCH_CHECK_TYPE(source.layout() == at::kStrided,
                   "backfold: tensor must be strided (not sparse or nested), got layout ",
                   source.layout());
  const at::AutoGradMode no_grad(false);
  dense_ = (source.is_non_overlapping_and_dense() ? source : source.contiguous()).detach();
  sizes_ = dense_.sizes().vec();
  strides_ = dense_.strides().vec();
}

void Packet::pack(const Key& key) {
  exact_ = packed_bytes(format_) == 0 || packed_bytes(format_) >= source_bytes_;
  payload_ = exact_ ? dense_.clone() : pack_payload(dense_, format_, key);
  dense_.reset();
}

Packet::Packet(const at::Tensor& source, const PackOptions& options) : Packet(source) {
  const GroupFormat format = format_for(type_, sizes_, strides_, options);
  constexpr const char* kLayouts[] = {"flat", "strided", "rotated"};
  how_ = std::to_string(format.bits) + (format.bits == 1 ? " bit, " : " bits, ") +
         kLayouts[static_cast<int>(format.layout)];
  format_ = format;
  pack(options.key);
}

Packet::Packet(const at::Tensor& source, const Codec& codec, std::string_view op, const Key& key)
    : Packet(source) {
  check_codec(codec);
  how_ = backfold::describe(codec);
  auto coding = coding_for(codec, dense_, {op}, key);
  if (const auto* misfit = std::get_if<Misfit>(&coding))
    TORCH_CHECK_VALUE(false, "codec: ", how_, " ", misfit->why);
  format_ = std::get<Format>(std::move(coding));
  pack(key);
}

at::Tensor Packet::unpack() const {
  const at::AutoGradMode no_grad(false);
  return exact_ ? payload_.clone() : unpack_payload(payload_, format_, sizes_, strides_, type_);
}

std::string Packet::describe() const {
  std::ostringstream text;
  text << "Packet(" << type_ << ' ' << at::IntArrayRef(sizes_) << ", ";
  text << (exact_ ? "kept as it is" : how_);
  text << ", " << bytes() << " of " << source_bytes_ << " bytes)";
  return text.str();
}

}  // namespace backfold::torch_layer
