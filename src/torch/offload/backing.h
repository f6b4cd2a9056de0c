// SPDX-License-Identifier: Apache-2.0
//
// Where the bytes of a device go, and the copies to and fro.
//
// Two kinds: pinned host memory, for a GPU, and a file, for a CPU. What is done with them, and
// when, is the same for both (offloader.h). Everything here may be called from any thread.

#ifndef BACKFOLD_TORCH_OFFLOAD_BACKING_H_
#define BACKFOLD_TORCH_OFFLOAD_BACKING_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "torch/offload/arena.h"

namespace backfold::torch_layer {

// One copy. Both of its ends must stay until it has ended.
class Transfer {
 public:
  virtual ~Transfer() = default;

  virtual bool has_ended() = 0;
  // Returns when it has.
  virtual void wait() = 0;
  // Lets what runs next on the current stream see what was copied. Without streams it waits.
  virtual void deliver() = 0;
  // Of a copy that has ended, or was delivered: why it failed; empty where it did not.
  virtual std::string failure() = 0;
};

class Backing {
 public:
  virtual ~Backing() = default;
  Backing(const Backing&) = delete;
  Backing& operator=(const Backing&) = delete;

  Arena& arena() { return arena_; }

  // Begin to copy the bytes of a tensor without gaps. `written_on` is the stream that wrote them. A
  // tensor that is read into was allocated on the current stream. Either raises c10::Error, or the
  // copy ends.
  virtual std::shared_ptr<Transfer> write(const at::Tensor& from,
                                          const std::optional<c10::Stream>& written_on,
                                          const Room& to) = 0;
  virtual std::shared_ptr<Transfer> read(const Room& from, const at::Tensor& into) = 0;

  // "a file in /tmp", for errors.
  virtual std::string name() const = 0;

 protected:
  Backing(Arena::MakeSlab make, std::size_t most_bytes) : arena_(std::move(make), most_bytes) {}

 private:
  Arena arena_;
};

// The one for a device; null where there is none. Raises where there should be one and cannot.
std::unique_ptr<Backing> backing_for(const at::Device& device);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_OFFLOAD_BACKING_H_
