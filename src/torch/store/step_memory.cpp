// SPDX-License-Identifier: Apache-2.0

#include "torch/store/step_memory.h"

#include <algorithm>

namespace backfold::torch_layer {
namespace {

constexpr std::size_t kLeastChunk = 1 << 16;

}  // namespace

void* StepMemory::do_allocate(std::size_t bytes, std::size_t alignment) {
  while (!std::align(alignment, bytes, next_, left_)) {
    if (used_ == chunks_.size()) {
      const std::size_t size = std::max({kLeastChunk, this->bytes(), bytes + alignment});
      chunks_.push_back({std::make_unique_for_overwrite<std::byte[]>(size), size});
    }
    next_ = chunks_[used_].memory.get();
    left_ = chunks_[used_].bytes;
    ++used_;
  }
  void* const given = next_;
  next_ = static_cast<std::byte*>(next_) + bytes;
  left_ -= bytes;
  return given;
}

void StepMemory::rewind() {
  chunks_.resize(used_);
#if defined(__SANITIZE_ADDRESS__)
  chunks_.clear();  // so that a use after this is seen
#endif
  used_ = 0;
  next_ = nullptr;
  left_ = 0;
}

std::size_t StepMemory::bytes() const {
  std::size_t bytes = 0;
  for (const Chunk& chunk : chunks_) bytes += chunk.bytes;
  return bytes;
}

std::unique_ptr<StepMemory> SpareMemory::take() {
  const std::lock_guard lock(mutex_);
  return spare_ ? std::move(spare_) : std::make_unique<StepMemory>();
}

void SpareMemory::give_back(std::unique_ptr<StepMemory> memory) {
  const std::lock_guard lock(mutex_);
  if (!spare_ || spare_->bytes() < memory->bytes()) spare_ = std::move(memory);
}

}  // namespace backfold::torch_layer
