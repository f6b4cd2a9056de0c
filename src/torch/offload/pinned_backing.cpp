// SPDX-License-Identifier: Apache-2.0

#include "torch/offload/pinned_backing.h"

#include <ATen/Functions.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <unistd.h>

#include <algorithm>

#include "torch/capture/undisturbed.h"
#include "torch/streams.h"

namespace backfold::torch_layer {
namespace {

// Neither autograd nor whoever watches calls has a say in a copy.
struct Unseen {
  const Undisturbed undisturbed;
  const at::DisableRecordFunctionGuard unwatched;
};

class PinnedSlab : public Slab {
 public:
  explicit PinnedSlab(at::Tensor memory)
      : Slab(memory.mutable_data_ptr(), memory.nbytes()), memory_(std::move(memory)) {}

  // So many bytes of it.
  at::Tensor part(std::size_t begin, std::size_t bytes) const {
    return memory_.narrow(0, static_cast<std::int64_t>(begin), static_cast<std::int64_t>(bytes));
  }

 private:
  const at::Tensor memory_;
};

std::unique_ptr<Slab> pinned_slab(std::size_t bytes) {
  const Unseen unseen;
  return std::make_unique<PinnedSlab>(at::empty({static_cast<std::int64_t>(bytes)},
                                                at::TensorOptions(at::kByte).pinned_memory(true)));
}

// Pinned memory is no other program's any more: a quarter of all memory stays free of it.
std::size_t most_pinned() {
  const auto pages = static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES));
  return pages / 4 * 3 * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

// A stream for copies to and from the arena; raises where that has no memory.
c10::Stream stream_beside(Arena& arena, const at::Device& device) {
  const auto room = arena.reserve(1);
  TORCH_CHECK(room, "offloading needs pinned host memory, which cannot be had: ", arena.why_full());
  arena.release(*room);
  return c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
}

class PinnedTransfer : public Transfer {
 public:
  PinnedTransfer(const at::Device& device, const c10::Stream& side)
      : device_(device), copied_(device.type()) {
    copied_.record(side);
  }

  bool has_ended() override { return copied_.query(); }
  void wait() override { copied_.synchronize(); }
  void deliver() override { copied_.block(*current_stream(device_)); }
  // What fails on a device raises where the device is next waited for, as all of torch's kernels.
  std::string failure() override { return {}; }

 private:
  const at::Device device_;
  c10::Event copied_;
};

}  // namespace

PinnedBacking::PinnedBacking(const at::Device& device)
    : Backing(pinned_slab, most_pinned()), device_(device), side_(stream_beside(arena(), device)) {}

std::shared_ptr<Transfer> PinnedBacking::copy(const at::Tensor& tensor, const Room& room, bool out,
                                              const c10::Stream& first) {
  TORCH_CHECK(
      !is_captured(first),
      "backfold: nothing can be offloaded while a CUDA graph is captured: at a replay, what "
      "is copied would be another tensor's memory");
  const Unseen unseen;
  const c10::DeviceGuard guard(device_);
  c10::Event ready(device_.type());
  ready.record(first);
  ready.block(side_);
  const c10::StreamGuard on_side(side_);
  try {
    std::int64_t begin = 0;
    for (const Extent& extent : room) {
      const std::int64_t count =
          std::min<std::int64_t>(tensor.numel() - begin, static_cast<std::int64_t>(extent.bytes));
      const at::Tensor there = static_cast<PinnedSlab&>(*extent.slab)
                                   .part(extent.begin, static_cast<std::size_t>(count));
      const at::Tensor here = tensor.narrow(0, begin, count);
      (out ? there : here).copy_(out ? here : there, /*non_blocking=*/true);
      begin += count;
    }
    return std::make_shared<PinnedTransfer>(device_, side_);
  } catch (...) {
    side_.synchronize();  // pieces that are on their way have no owner any more
    throw;
  }
}

std::shared_ptr<Transfer> PinnedBacking::write(const at::Tensor& from,
                                               const std::optional<c10::Stream>& written_on,
                                               const Room& to) {
  return copy(from, to, true, *written_on);
}

std::shared_ptr<Transfer> PinnedBacking::read(const Room& from, const at::Tensor& into) {
  // Its memory may have been another tensor's, which earlier work of this stream still uses.
  return copy(into, from, false, *current_stream(device_));
}

}  // namespace backfold::torch_layer
