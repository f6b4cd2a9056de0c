// SPDX-License-Identifier: Apache-2.0
//
// Tensors as they were before a piece of program wrote to them, for the memory of those alone that
// it does write to.
//
// While one watches a thread, an operator that writes to the memory of a listed tensor, through any
// view or alias (`parameter.data`), is preceded by a copy of the tensor. One that is given other
// memory (`parameter.data = ...`) needs no copy: its old memory is kept alive. What no operator
// writes is not seen (a graph of torch.compile, NumPy on the same memory); where it counts as a new
// version for autograd, unseen() says so.

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
  // Tensors that nobody can write to in place (sparse ones, expanded ones) are passed over.
  explicit Originals(const std::vector<at::Tensor>& tensors);
  Originals(const Originals&) = delete;
  Originals& operator=(const Originals&) = delete;

  // From watch() to stop(), on one thread, copies are made.
  void watch();
  void stop();

  // Indices of tensors that have another version than copies explain. After stop().
  std::vector<std::size_t> unseen() const;

  // After stop(): every tensor as it was at watch(). Versions stay what they are, as in all of
  // these.
  void restore();

  // The same for a while, but for tensors that were changed again after stop().
  void rewind();
  void return_from_rewind();

  // For the callback.
  void before_write(const at::Tensor& tensor) noexcept;

 private:
  struct Entry {
    std::size_t index;  // in what was given
    at::Tensor tensor;
    at::Tensor alias;              // of the memory that it had
    at::Tensor copy = {};          // of what was there, once somebody writes
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

// What is written to tensors while one lives does not last.
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
