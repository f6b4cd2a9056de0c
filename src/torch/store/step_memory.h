// SPDX-License-Identifier: Apache-2.0
//
// Memory for what one block notes down and drops at its end, kept for the next block: steps of a
// training loop need as much as the last one, and memory from the system has to be mapped page by
// page.

#ifndef BACKFOLD_TORCH_STORE_STEP_MEMORY_H_
#define BACKFOLD_TORCH_STORE_STEP_MEMORY_H_

#include <cstddef>
#include <memory>
#include <memory_resource>
#include <mutex>
#include <utility>
#include <vector>

namespace backfold::torch_layer {

// Gives memory in order and takes nothing back before rewind(). For one thread at a time.
class StepMemory : public std::pmr::memory_resource {
 public:
  StepMemory() = default;
  StepMemory(const StepMemory&) = delete;
  StepMemory& operator=(const StepMemory&) = delete;

  // Nothing that was given is used any more. Chunks that were not needed since the last rewind are
  // freed.
  void rewind();

  // Bytes that are kept, used or not.
  std::size_t bytes() const;

 private:
  struct Chunk {
    std::unique_ptr<std::byte[]> memory;
    std::size_t bytes = 0;
  };

  void* do_allocate(std::size_t bytes, std::size_t alignment) override;
  void do_deallocate(void*, std::size_t, std::size_t) override {}
  bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override {
    return this == &other;
  }

  std::vector<Chunk> chunks_;
  std::size_t used_ = 0;  // chunks, the last of them as far as
  void* next_ = nullptr;
  std::size_t left_ = 0;
};

// Where blocks find the memory of the last one: one at a time has it, others get new memory.
class SpareMemory {
 public:
  // What a block uses for as long as it lives.
  class Lent {
   public:
    explicit Lent(SpareMemory& owner) : owner_(owner), memory_(owner.take()) {}
    ~Lent() {
      memory_->rewind();
      owner_.give_back(std::move(memory_));
    }
    Lent(const Lent&) = delete;
    Lent& operator=(const Lent&) = delete;

    StepMemory* get() const { return memory_.get(); }

   private:
    SpareMemory& owner_;
    std::unique_ptr<StepMemory> memory_;
  };

 private:
  std::unique_ptr<StepMemory> take();
  void give_back(std::unique_ptr<StepMemory> memory);

  std::mutex mutex_;
  std::unique_ptr<StepMemory> spare_;
};

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_STORE_STEP_MEMORY_H_
