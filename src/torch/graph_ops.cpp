// SPDX-License-Identifier: Apache-2.0
//
// The operators that stand in compiled graphs: fold and keep in a forward; arrive, once, and unfold
// in its backward.
//
// fold rounds with the key of the block that it runs in, which is another at each step and each
// place. So it must not be replayed by a CUDA graph, and a graph has each place once.

#include <ATen/Functions.h>
#include <torch/library.h>

#include "torch/capture/graph.h"
#include "torch/capture/undisturbed.h"
#include "torch/probe/graphs.h"

namespace backfold::torch_layer {
namespace {

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

at::Tensor fold(const at::Tensor& input, at::IntArrayRef stride, std::int64_t floor,
                bool zero_exact, bool exact, std::int64_t graph, std::string_view module,
                std::string_view name) {
  TORCH_CHECK_VALUE(0 <= floor && floor <= 16, "backfold.fold: floor must be from 0 to 16, got ",
                    floor);
  const Undisturbed undisturbed;
  const GraphDemand demand{static_cast<int>(floor), zero_exact, exact};
  return GraphPacket::ticket(fold_in_graph(laid_out(input, stride), demand, {graph, module, name}));
}

at::Tensor unfold(const at::Tensor& ticket, at::IntArrayRef size, at::IntArrayRef /*stride*/,
                  at::ScalarType dtype) {
  const Undisturbed undisturbed;
  const auto packet = GraphPacket::of(ticket);
  TORCH_CHECK(packet,
              "backfold.unfold: what a compiled graph hands over is not what its forward has kept, "
              "but a copy of it");
  at::Tensor tensor = packet->read();
  TORCH_CHECK(tensor.sizes() == size && tensor.scalar_type() == dtype, "backfold.unfold: a tensor ",
              tensor.sizes(), " of ", tensor.scalar_type(), " was kept, and ", size, " of ", dtype,
              " is asked for");
  return tensor;
}

// Backward begins. Another ticket for the same packet, so that the graph has a use for it. While a
// graph is compiled its first tensor is there in place of a ticket.
at::Tensor arrive(const at::Tensor& ticket, at::TensorList tensors, at::IntArrayRef sizes,
                  std::int64_t lasting) {
  const auto packet = GraphPacket::of(ticket);
  if (!packet) return at::empty({GraphPacket::kTicketBytes}, ticket.options().dtype(at::kByte));
  if (const auto runs = packet->runs()) {
    const Undisturbed undisturbed;
    runs->arrived(*packet, tensors, sizes, lasting);
  }
  return GraphPacket::ticket(packet);
}

// Of no bytes: it stands for the note that was taken.
at::Tensor keep(const at::Tensor& input, std::string_view module, std::string_view name,
                std::string_view reason) {
  keep_in_graph(input, {0, module, name}, reason);
  return at::empty({0}, input.options().dtype(at::kByte));
}

at::Tensor ticket_meta(const at::Tensor& like) {
  return at::empty({GraphPacket::kTicketBytes}, like.options().dtype(at::kByte));
}

at::Tensor fold_meta(const at::Tensor& input, c10::SymIntArrayRef, std::int64_t, bool, bool,
                     std::int64_t, std::string_view, std::string_view) {
  return ticket_meta(input);
}

at::Tensor unfold_meta(const at::Tensor& ticket, c10::SymIntArrayRef size,
                       c10::SymIntArrayRef stride, at::ScalarType dtype) {
  return at::empty_strided_symint(size, stride, ticket.options().dtype(dtype));
}

at::Tensor arrive_meta(const at::Tensor& ticket, at::TensorList, c10::SymIntArrayRef,
                       std::int64_t) {
  return ticket_meta(ticket);
}

at::Tensor keep_meta(const at::Tensor& input, std::string_view, std::string_view,
                     std::string_view) {
  return at::empty({0}, input.options().dtype(at::kByte));
}

TORCH_LIBRARY_FRAGMENT(backfold, library) {
  const std::vector<at::Tag> tags = {at::Tag::cudagraph_unsafe, at::Tag::flexible_layout};
  library.def(
      "fold(Tensor input, SymInt[] stride, int floor, bool zero_exact, bool exact, int graph, "
      "str module, str name) -> Tensor",
      tags);
  library.def("unfold(Tensor ticket, SymInt[] size, SymInt[] stride, ScalarType dtype) -> Tensor",
              tags);
  library.def("arrive(Tensor ticket, Tensor[] tensors, SymInt[] sizes, int lasting) -> Tensor",
              tags);
  library.def("keep(Tensor input, str module, str name, str reason) -> Tensor", tags);
}

TORCH_LIBRARY_IMPL(backfold, CPU, library) {
  library.impl("fold", &fold);
  library.impl("unfold", &unfold);
  library.impl("arrive", &arrive);
  library.impl("keep", &keep);
}
TORCH_LIBRARY_IMPL(backfold, CUDA, library) {
  library.impl("fold", &fold);
  library.impl("unfold", &unfold);
  library.impl("arrive", &arrive);
  library.impl("keep", &keep);
}
TORCH_LIBRARY_IMPL(backfold, Meta, library) {
  library.impl("fold", &fold_meta);
  library.impl("unfold", &unfold_meta);
  library.impl("arrive", &arrive_meta);
  library.impl("keep", &keep_meta);
}

}  // namespace
}  // namespace backfold::torch_layer
