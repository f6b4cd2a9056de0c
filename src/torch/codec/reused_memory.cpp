// SPDX-License-Identifier: Apache-2.0

#include "torch/codec/reused_memory.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <map>
#include <mutex>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace backfold::torch_layer {
namespace {

constexpr std::int64_t kStepsKept = 4;
constexpr std::size_t kGranularity = 1 << 16;

struct Block {
  void* memory = nullptr;
  std::size_t bytes = 0;
  std::int64_t step = 0;  // in which it was given back
  bool told = false;      // a profiler knows of it
};

// Lets a sanitizer see the use of memory that is only kept.
void forbid([[maybe_unused]] const Block& block) {
#if defined(__SANITIZE_ADDRESS__)
  ASAN_POISON_MEMORY_REGION(block.memory, block.bytes);
#endif
}
void allow([[maybe_unused]] const Block& block) {
#if defined(__SANITIZE_ADDRESS__)
  ASAN_UNPOISON_MEMORY_REGION(block.memory, block.bytes);
#endif
}

class Keeper final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes < kReusedFrom) return c10::GetCPUAllocator()->allocate(bytes);
    const std::size_t rounded = (bytes + kGranularity - 1) / kGranularity * kGranularity;
    Block block = take(rounded);
    if (!block.memory) block = {c10::alloc_cpu(rounded), rounded};
    block.told = c10::memoryProfilingEnabled();
    if (block.told) c10::profiledCPUMemoryReporter().New(block.memory, bytes);
    auto* owned = new Block(block);
    return {block.memory, owned, &give_back, c10::Device(c10::kCPU)};
  }

  void copy_data(void* to, const void* from, std::size_t count) const override {
    default_copy_data(to, from, count);
  }

  void age() {
    const std::lock_guard lock(mutex_);
    ++step_;
    release([this](const Block& block) { return block.step + kStepsKept < step_; });
  }

  void add_user(int count) {
    const std::lock_guard lock(mutex_);
    users_ += count;
    if (users_ == 0) release([](const Block&) { return true; });
  }

  std::size_t kept() {
    const std::lock_guard lock(mutex_);
    return kept_;
  }

 private:
  // The smallest block that fits and wastes no more than a quarter of it.
  Block take(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    const auto found = free_.lower_bound(bytes);
    if (found == free_.end() || found->first - bytes > bytes / 4) return {};
    const Block block = found->second.back();  // the one given back last is warm
    found->second.pop_back();
    if (found->second.empty()) free_.erase(found);
    kept_ -= block.bytes;
    allow(block);
    return block;
  }

  static void give_back(void* context);

  void keep(Block block) {
    const std::lock_guard lock(mutex_);
    if (users_ == 0) {
      c10::free_cpu(block.memory);
      return;
    }
    block.step = step_;
    kept_ += block.bytes;
    forbid(block);
    free_[block.bytes].push_back(block);
  }

  template <typename Which>
  void release(const Which& which) {
    for (auto size = free_.begin(); size != free_.end();) {
      std::erase_if(size->second, [&](const Block& block) {
        if (!which(block)) return false;
        kept_ -= block.bytes;
        allow(block);
        c10::free_cpu(block.memory);
        return true;
      });
      size = size->second.empty() ? free_.erase(size) : std::next(size);
    }
  }

  std::mutex mutex_;
  std::map<std::size_t, std::vector<Block>> free_;  // by size
  std::size_t kept_ = 0;
  std::int64_t step_ = 0;
  int users_ = 0;
};

Keeper& keeper() {
  static Keeper& instance = *new Keeper;  // tensors may outlive static destructors
  return instance;
}

void Keeper::give_back(void* context) {
  auto* owned = static_cast<Block*>(context);
  if (owned->told) c10::profiledCPUMemoryReporter().Delete(owned->memory);
  keeper().keep(*owned);
  delete owned;
}

}  // namespace

c10::Allocator& reused_memory() { return keeper(); }
std::size_t bytes_kept_for_reuse() { return keeper().kept(); }
void age_reused_memory() { keeper().age(); }

ReusedMemoryUser::ReusedMemoryUser() { keeper().add_user(1); }
ReusedMemoryUser::~ReusedMemoryUser() { keeper().add_user(-1); }

}  // namespace backfold::torch_layer
