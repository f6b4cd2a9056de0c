// SPDX-License-Identifier: Apache-2.0
//
// Pinned host memory, from torch's own allocator in slabs of powers of two, to which it rounds, and
// copies on a stream of their own.
//
// All copies of a device are on one stream: what is read was written before, and room that is given
// back and taken again is written after it was read. Streams wait for each other through events;
// the host waits only in Transfer::wait().

#ifndef BACKFOLD_TORCH_OFFLOAD_PINNED_BACKING_H_
#define BACKFOLD_TORCH_OFFLOAD_PINNED_BACKING_H_

#include "torch/offload/backing.h"

namespace backfold::torch_layer {

class PinnedBacking : public Backing {
 public:
  // Raises where no pinned memory can be had.
  explicit PinnedBacking(const at::Device& device);

  std::shared_ptr<Transfer> write(const at::Tensor& from,
                                  const std::optional<c10::Stream>& written_on,
                                  const Room& to) override;
  std::shared_ptr<Transfer> read(const Room& from, const at::Tensor& into) override;
  std::string name() const override { return "pinned host memory"; }

 private:
  // Copies on the side stream, after what `first` has been given by now.
  std::shared_ptr<Transfer> copy(const at::Tensor& tensor, const Room& room, bool out,
                                 const c10::Stream& first);

  const at::Device device_;
  const c10::Stream side_;
};

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_OFFLOAD_PINNED_BACKING_H_
