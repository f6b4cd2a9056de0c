// SPDX-License-Identifier: Apache-2.0
//
// The operators that stand in compiled graphs: fold and keep at the end of a forward, unfold at the
// beginning of its backward.
//
// fold rounds with the key of the block that it runs in, which is another at each step and each
// place. So it must not be replayed by a CUDA graph, and a graph has each place once.

#include <ATen/Functions.h>
#include <torch/library.h>

#include "torch/capture/graph.h"
#include "torch/packet.h"

namespace backfold::torch_layer {
namespace {

// Bools become bits, whatever the width.
Format format_of(at::ScalarType type, at::IntArrayRef sizes, std::int64_t bits, bool zero_exact) {
  if (type != at::kBool)
    return format_for(type, sizes, {}, {.bits = bits, .layout = "flat", .zero_exact = zero_exact});
  return PredicateFormat{.type = ElementType::kBool, .count = c10::multiply_integers(sizes)};
}

// In memory as the graph was compiled for: the compiler may have found it better to lay out the
// tensor in another way since.
at::Tensor laid_out(const at::Tensor& input, at::IntArrayRef stride) {
  bool same = true;
  for (std::int64_t i = 0; i < input.dim(); ++i)
    same &= input.size(i) == 1 || input.stride(i) == stride[i];
  if (same) return input;
  at::Tensor copy = at::empty_strided(input.sizes(), stride, input.options());
  copy.copy_(input);
  return copy;
}

at::Tensor fold(const at::Tensor& input, at::IntArrayRef stride, std::int64_t bits, bool zero_exact,
                std::string_view module, std::string_view name) {
  const Format format = format_of(input.scalar_type(), input.sizes(), bits, zero_exact);
  return fold_in_graph(laid_out(input, stride), format, {module, name});
}

at::Tensor unfold(const at::Tensor& payload, at::IntArrayRef size, at::IntArrayRef stride,
                  at::ScalarType dtype, std::int64_t bits, bool zero_exact) {
  return unpack_payload(payload, format_of(dtype, size, bits, zero_exact), size, stride, dtype);
}

// Of no bytes: it stands for the note that was taken.
at::Tensor keep(const at::Tensor& input, std::string_view module, std::string_view name,
                std::string_view reason) {
  keep_in_graph(input, {module, name}, reason);
  return at::empty({0}, input.options().dtype(at::kByte));
}

// The bytes of a payload as an expression in the sizes of its source (PredicateFormat and
// GroupGeometry, symbolically).
c10::SymInt symbolic_bytes(const at::Tensor& input, std::int64_t bits) {
  constexpr std::int64_t kAlignment = kPayloadAlignment;
  const auto aligned = [](const c10::SymInt& bytes) {
    return (bytes + (kAlignment - 1)) / kAlignment * kAlignment;
  };
  if (input.scalar_type() == at::kBool) return aligned((input.sym_numel() + 7) / 8);
  const GroupFormat format;
  const c10::SymInt groups = (input.sym_numel() + (format.group - 1)) / format.group;
  return aligned(groups * 4) + groups * (format.group * bits / 8);
}

at::Tensor fold_meta(const at::Tensor& input, c10::SymIntArrayRef, std::int64_t bits,
                     bool zero_exact, std::string_view, std::string_view) {
  format_of(input.scalar_type(), {}, bits, zero_exact);  // checks
  return at::empty_symint({symbolic_bytes(input, bits)}, input.options().dtype(at::kByte));
}

at::Tensor unfold_meta(const at::Tensor& payload, c10::SymIntArrayRef size,
                       c10::SymIntArrayRef stride, at::ScalarType dtype, std::int64_t bits,
                       bool zero_exact) {
  format_of(dtype, {}, bits, zero_exact);  // checks
  return at::empty_strided_symint(size, stride, payload.options().dtype(dtype));
}

at::Tensor keep_meta(const at::Tensor& input, std::string_view, std::string_view,
                     std::string_view) {
  return at::empty({0}, input.options().dtype(at::kByte));
}

TORCH_LIBRARY_FRAGMENT(backfold, library) {
  library.def(
      "fold(Tensor input, SymInt[] stride, int bits, bool zero_exact, str module, str name) -> "
      "Tensor",
      {at::Tag::cudagraph_unsafe, at::Tag::flexible_layout});
  library.def(
      "unfold(Tensor payload, SymInt[] size, SymInt[] stride, ScalarType dtype, int bits, "
      "bool zero_exact) -> Tensor");
  library.def("keep(Tensor input, str module, str name, str reason) -> Tensor",
              {at::Tag::cudagraph_unsafe, at::Tag::flexible_layout});
}

TORCH_LIBRARY_IMPL(backfold, CPU, library) {
  library.impl("fold", &fold);
  library.impl("unfold", &unfold);
  library.impl("keep", &keep);
}
TORCH_LIBRARY_IMPL(backfold, CUDA, library) {
  library.impl("fold", &fold);
  library.impl("unfold", &unfold);
  library.impl("keep", &keep);
}
TORCH_LIBRARY_IMPL(backfold, Meta, library) {
  library.impl("fold", &fold_meta);
  library.impl("unfold", &unfold_meta);
  library.impl("keep", &keep_meta);
}

}  // namespace
}  // namespace backfold::torch_layer
