// SPDX-License-Identifier: Apache-2.0
//
// Tensors as they were before some code wrote to them, at the cost of memory only for those that it
// does write to.
//
// While a thread is watched, a listed tensor is copied before an operator writes to its memory,
// through any view or alias (`parameter.data`). A tensor that is given other memory
// (`parameter.data = ...`) needs no copy, as its old memory is kept alive. Writes that bypass
// operators are not seen (a graph of torch.compile, NumPy on the same memory); unseen() lists those
// that gave the tensor a new version.

#ifndef BACKFOLD_TORCH_PROBE_ORIGINALS_H_
#define BACKFOLD_TORCH_PROBE_ORIGINALS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

namespace backfold::torch_layer {

class Originals : public std::enable_shared_from_this<Originals> {
 public:
  // Ignores tensors that cannot be written in place (sparse ones, expanded ones).
  explicit Originals(const std::vector<at::Tensor>& tensors);
  Originals(const Originals&) = delete;
  Originals& operator=(const Originals&) = delete;

  // Copies are made from watch() to stop(), which must run on one thread.
  void watch();
  void stop();

  // After stop(): indices of tensors whose version changed without a copy to explain it.
  std::vector<std::size_t> unseen() const;

  // After stop(): puts every tensor back to what it was at watch(). Like rewind(), leaves versions
  // unchanged.
  void restore();

  // The same until return_from_rewind(), except for tensors that changed again after stop().
  void rewind();
  void return_from_rewind();

  // For the callback.
  void before_write(const at::Tensor& tensor) noexcept;

 private:
  struct Entry {
    std::size_t index;  // in the list given
    at::Tensor tensor;
    at::Tensor alias;              // of its original memory
    at::Tensor copy = {};          // of its original values, once it is written
    std::uint32_t version = 0;     // at watch(), then at stop()
    const void* memory = nullptr;  // at stop()
    bool failed = false;           // to copy, or written unseen
    bool exchanged = false;
  };

  static void exchange(Entry& entry);

  std::vector<Entry> entries_;
  std::unordered_multimap<const void*, std::size_t> by_storage_;
  bool watches_ = false;
};

// Undoes, when it is destroyed, all writes to some tensors during its lifetime.
class Undone {
 public:
  explicit Undone(const std::vector<at::Tensor>& tensors)
      : originals_(std::make_shared<Originals>(tensors)) {
    originals_->watch();
  }
  ~Undone() {
    originals_->stop();
    originals_->restore();
  }
  Undone(const Undone&) = delete;
  Undone& operator=(const Undone&) = delete;

 private:
  const std::shared_ptr<Originals> originals_;
};

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PROBE_ORIGINALS_H_
