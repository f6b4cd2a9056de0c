// SPDX-License-Identifier: Apache-2.0
//
// The group quantizer as torch operators, for code that is traced or compiled.

#include <ATen/Functions.h>
#include <torch/library.h>

#include "torch/packet.h"

namespace backfold::torch_layer {
namespace {

PackOptions options_of(std::int64_t bits, std::string_view layout, std::int64_t group,
                       bool zero_exact, std::int64_t seed, std::int64_t stream) {
  return {bits, layout, group, zero_exact,
          Key{static_cast<std::uint64_t>(seed), static_cast<std::uint64_t>(stream)}};
}

at::Tensor pack_op(const at::Tensor& input, std::int64_t bits, std::string_view layout,
                   std::int64_t group, bool zero_exact, std::int64_t seed, std::int64_t stream) {
  const PackOptions options = options_of(bits, layout, group, zero_exact, seed, stream);
  const GroupFormat format =
      format_for(input.scalar_type(), input.sizes(), input.strides(), options);
  return pack_payload(input, format, options.key);
}

at::Tensor unpack_op(const at::Tensor& payload, at::IntArrayRef size, at::IntArrayRef stride,
                     at::ScalarType dtype, std::int64_t bits, std::string_view layout,
                     std::int64_t group, bool zero_exact) {
  const PackOptions options = options_of(bits, layout, group, zero_exact, 0, 0);
  const GroupFormat format = format_for(dtype, size, stride, options);
  return unpack_payload(payload, format, size, stride, dtype);
}

// The bytes of a payload as an expression in the sizes of its source (GroupGeometry, symbolically).
c10::SymInt symbolic_bytes(const at::Tensor& input, const GroupFormat& format) {
  const c10::SymInt group = format.group;
  c10::SymInt groups = (input.sym_numel() + group - 1) / group;
  if (format.layout == Layout::kStrided) {
    c10::SymInt columns = 1;
    const auto sizes = input.sym_sizes(), strides = input.sym_strides();
    for (std::size_t i = 0; i < sizes.size(); ++i)
      if (strides[i] == 1 && sizes[i] > 1) columns = sizes[i];
    groups = (input.sym_numel() / columns + group - 1) / group * columns;
  }
  const std::int64_t alignment = kPayloadAlignment;
  return (groups * 4 + (alignment - 1)) / alignment * alignment +
         groups * (format.group * format.bits / 8);
}

// Checks the options without a shape.
GroupFormat shapeless_format(at::ScalarType type, const PackOptions& options) {
  return format_for(type, {}, {}, options);
}

at::Tensor pack_meta(const at::Tensor& input, std::int64_t bits, std::string_view layout,
                     std::int64_t group, bool zero_exact, std::int64_t seed, std::int64_t stream) {
  const GroupFormat format = shapeless_format(
      input.scalar_type(), options_of(bits, layout, group, zero_exact, seed, stream));
  return at::empty_symint({symbolic_bytes(input, format)}, input.options().dtype(at::kByte));
}

at::Tensor unpack_meta(const at::Tensor& payload, c10::SymIntArrayRef size,
                       c10::SymIntArrayRef stride, at::ScalarType dtype, std::int64_t bits,
                       std::string_view layout, std::int64_t group, bool zero_exact) {
  shapeless_format(dtype, options_of(bits, layout, group, zero_exact, 0, 0));
  return at::empty_strided_symint(size, stride, payload.options().dtype(dtype));
}

TORCH_LIBRARY(backfold, library) {
  library.def(
      "pack(Tensor input, int bits=4, str layout='flat', int group=128, bool zero_exact=False, "
      "int seed=0, int stream=0) -> Tensor");
  library.def(
      "unpack(Tensor payload, SymInt[] size, SymInt[] stride, ScalarType dtype, int bits=4, "
      "str layout='flat', int group=128, bool zero_exact=False) -> Tensor");
}

TORCH_LIBRARY_IMPL(backfold, CPU, library) {
  library.impl("pack", &pack_op);
  library.impl("unpack", &unpack_op);
}
TORCH_LIBRARY_IMPL(backfold, CUDA, library) {
  library.impl("pack", &pack_op);
  library.impl("unpack", &unpack_op);
}
TORCH_LIBRARY_IMPL(backfold, Meta, library) {
  library.impl("pack", &pack_meta);
  library.impl("unpack", &unpack_meta);
}

}  // namespace
}  // namespace backfold::torch_layer
