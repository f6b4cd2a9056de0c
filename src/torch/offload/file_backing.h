// SPDX-License-Identifier: Apache-2.0
//
// A file that memory is copied to, mapped slab by slab.
//
// Each slab is a file of its own in the folder for temporary files (TMPDIR, else /tmp), nameless
// from the start, so that nothing is left of it however the process ends. Its space is allocated
// before it is mapped: a full disk is an error here, not a signal in the middle of a copy. A thread
// copies, and unmaps what it has written, so that the system may write it out and take the memory.

#ifndef BACKFOLD_TORCH_OFFLOAD_FILE_BACKING_H_
#define BACKFOLD_TORCH_OFFLOAD_FILE_BACKING_H_

#include <cstddef>
#include <limits>

#include "torch/offload/backing.h"
#include "torch/offload/worker.h"

namespace backfold::torch_layer {

class FileBacking : public Backing {
 public:
  // Takes at most that much of the disk.
  explicit FileBacking(std::size_t most_bytes = std::numeric_limits<std::size_t>::max());

  std::shared_ptr<Transfer> write(const at::Tensor& from, const std::optional<c10::Stream>&,
                                  const Room& to) override;
  std::shared_ptr<Transfer> read(const Room& from, const at::Tensor& into) override;
  std::string name() const override;

 private:
  Worker worker_;
};

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_OFFLOAD_FILE_BACKING_H_
