// SPDX-License-Identifier: Apache-2.0

#include "torch/capture/graph_packet.h"

#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>

#include <utility>

#include "torch/capture/undisturbed.h"
#include "torch/probe/graphs.h"
#include "torch/streams.h"

namespace backfold::torch_layer {
namespace {

// What the memory of a ticket is: bytes of the allocator, and the packet.
struct Owner {
  c10::DataPtr memory;
  std::shared_ptr<GraphPacket> packet;
};

void drop(void* owner) { delete static_cast<Owner*>(owner); }

// The bytes of a copy.
at::Tensor copied(const at::Tensor& dense) {
  const c10::DeviceGuard guard(dense.device());
  at::Tensor copy = allocate(dense.sizes(), dense.strides(), dense.scalar_type(), dense.device());
  copy.copy_(dense);
  return bytes_in(copy.storage());
}

}  // namespace

GraphPacket::GraphPacket(const at::Tensor& dense, std::optional<Format> format, const Key& key,
                         Site& site, std::shared_ptr<SiteTable> sites)
    : site_(site),
      sites_(std::move(sites)),
      format_(std::move(format)),
      view_{{dense.sizes().begin(), dense.sizes().end()},
            {dense.strides().begin(), dense.strides().end()},
            0},
      type_(dense.scalar_type()),
      device_(dense.device()),
      stream_(current_stream(dense.device())),
      payload_(format_ ? pack_payload(dense, *format_, key) : copied(dense)),
      bytes_(static_cast<std::int64_t>(payload_.nbytes())) {}

void GraphPacket::watch(const std::shared_ptr<GraphRuns>& runs, std::int64_t graph) {
  runs_ = runs;
  graph_ = graph;
}

at::Tensor GraphPacket::read() {
  if (const auto runs = runs_.lock()) runs->read(shared_from_this());
  at::Tensor tensor = unpack();
  if (plain_) plain_.timeline().read(site_, static_cast<std::int64_t>(tensor.nbytes()));
  return tensor;
}

void GraphPacket::charge(Charge held, Charge plain) {
  held_ = std::move(held);
  plain_ = std::move(plain);
}

void GraphPacket::leave(const Passage& passage) {
  parcel_ = passage.send(payload_, stream_);
  if (!parcel_) return;
  payload_.reset();
  held_.end();
}

at::Tensor GraphPacket::payload() const {
  if (parcel_) return parcel_->get();
  const std::optional<c10::Stream> now = current_stream(device_);
  if (now && *now != *stream_) hand_over(payload_.storage().data_ptr(), *stream_, *now);
  return payload_;
}

at::Tensor GraphPacket::unpack() const {
  const c10::DeviceGuard guard(device_);
  const at::Tensor bytes = payload();
  if (format_) return unpack_payload(bytes, *format_, view_.sizes, view_.strides, type_);
  at::Tensor copy = allocate(view_.sizes, view_.strides, type_, device_);
  copy.copy_(tensor_at(bytes.storage(), view_, type_));
  return copy;
}

at::Tensor GraphPacket::ticket(std::shared_ptr<GraphPacket> packet) {
  const at::Device device = packet->device_;
  const c10::DeviceGuard guard(device);
  const at::Tensor bytes = allocate({kTicketBytes}, {1}, at::kByte, device);
  auto owner = std::make_unique<Owner>();
  owner->packet = std::move(packet);
  owner->memory = bytes.storage().set_data_ptr(c10::DataPtr(nullptr, device));
  void* const memory = owner->memory.get();
  c10::DataPtr owned(memory, owner.release(), &drop, device);
  c10::Storage storage(c10::Storage::use_byte_size_t(), kTicketBytes, std::move(owned), nullptr,
                       false);
  return bytes_in(std::move(storage));
}

std::shared_ptr<GraphPacket> GraphPacket::of(const at::Tensor& ticket) {
  const Owner* owner =
      ticket.has_storage() ? ticket.storage().data_ptr().cast_context<Owner>(&drop) : nullptr;
  return owner ? owner->packet : nullptr;
}

}  // namespace backfold::torch_layer
