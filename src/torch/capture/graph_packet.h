// SPDX-License-Identifier: Apache-2.0
//
// One packed tensor of a compiled graph.
//
// A graph is compiled once, but the plan changes widths from step to step, and with them the bytes
// of a packet. So what passes from a forward graph to its backward graph is a ticket: a tensor of
// 16 bytes that mean nothing, whose memory owns the packet. The packet goes where the ticket's
// memory goes, whether backward ran or not, and a graph that is kept can be run backward again.
//
// A compiler may write over the memory of tensors that it is done with, and no version counter
// tells. So a packet never refers to its source: what is kept unrounded is copied.

#ifndef BACKFOLD_TORCH_CAPTURE_GRAPH_PACKET_H_
#define BACKFOLD_TORCH_CAPTURE_GRAPH_PACKET_H_

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>

#include "torch/capture/site.h"
#include "torch/store/shared_packet.h"

namespace backfold::torch_layer {

class GraphRuns;

class GraphPacket : public std::enable_shared_from_this<GraphPacket> {
 public:
  // Packs a dense tensor on the current stream; without a format, copies it.
  GraphPacket(const at::Tensor& dense, std::optional<Format> format, const Key& key, Site& site,
              std::shared_ptr<SiteTable> sites);

  std::int64_t bytes() const { return bytes_; }
  Site& site() const { return site_; }
  const std::optional<Format>& format() const { return format_; }

  // Tells `runs` when backward reads it. `graph` is the number of the graph, and of its run in the
  // step above 32 bits.
  void watch(const std::shared_ptr<GraphRuns>& runs, std::int64_t graph);

  // What it takes of the memory that is held, until it leaves its device or goes; and what autograd
  // alone would keep.
  void charge(Charge held, Charge plain);
  // Its payload leaves the device.
  void leave(const Passage& passage);

  // The tensor, for the backward graph; new, and its own to write to.
  at::Tensor read();
  // The same for others.
  at::Tensor unpack() const;
  // Who is told of it, as part of which run; null where nobody is.
  std::shared_ptr<GraphRuns> runs() const { return runs_.lock(); }
  std::int64_t graph() const { return graph_; }
  // The bytes, on the current stream, for whoever does not write to them.
  at::Tensor payload() const;

  // A ticket for the packet; and the packet of a ticket, null for a tensor that is none, such as a
  // copy of one.
  static at::Tensor ticket(std::shared_ptr<GraphPacket> packet);
  static std::shared_ptr<GraphPacket> of(const at::Tensor& ticket);

  static constexpr std::int64_t kTicketBytes = 16;

 private:
  Site& site_;
  const std::shared_ptr<SiteTable> sites_;  // alive, with the site
  const std::optional<Format> format_;
  const View view_;
  const at::ScalarType type_;
  const at::Device device_;
  const std::optional<c10::Stream> stream_;
  at::Tensor payload_;  // undefined while it is a parcel
  std::int64_t bytes_ = 0;
  std::shared_ptr<Parcel> parcel_;
  Charge held_, plain_;
  std::weak_ptr<GraphRuns> runs_;
  std::int64_t graph_ = 0;
};

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_CAPTURE_GRAPH_PACKET_H_
