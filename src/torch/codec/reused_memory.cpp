// SPDX-License-Identifier: Apache-2.0

#include "torch/codec/reused_memory.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace backfold::torch_layer {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t kStepsKept = 4;
constexpr std::size_t kGranularity = 1 << 16;
// Of what steps have in use at once, that much more is kept: packets and what is decoded from them
// differ in size, so that one cannot always be made of the other's memory.
constexpr std::size_t kPartSpare = 2;

struct Block {
  void* memory = nullptr;
  std::size_t bytes = 0;
  std::int64_t step = 0;   // in which it was given back
  std::uint64_t turn = 0;  // the same in the order of all blocks
  bool told = false;       // a profiler knows of it
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
    if (!block.memory) block = fresh(rounded);
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
    most_in_use_[++step_ % most_in_use_.size()] = in_use_;
    trim();
    release([this](const Block& block) { return block.step + kStepsKept < step_; });
  }

  void release_if_idle(std::chrono::milliseconds idle) {
    const std::lock_guard lock(mutex_);
    if (Clock::now() - last_used_ >= idle) release([](const Block&) { return true; });
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
    use(block.bytes);
    allow(block);
    return block;
  }

  Block fresh(std::size_t bytes) {
    void* memory = c10::alloc_cpu(bytes);
    const std::lock_guard lock(mutex_);
    use(bytes);
    return {memory, bytes};
  }

  void use(std::size_t bytes) {
    in_use_ += bytes;
    std::size_t& most = most_in_use_[step_ % most_in_use_.size()];
    most = std::max(most, in_use_);
    last_used_ = Clock::now();
  }

  static void give_back(void* context);

  void keep(Block block) {
    const std::lock_guard lock(mutex_);
    in_use_ -= block.bytes;
    last_used_ = Clock::now();
    if (users_ == 0) {
      c10::free_cpu(block.memory);
      return;
    }
    block.step = step_;
    block.turn = ++turn_;
    kept_ += block.bytes;
    forbid(block);
    free_[block.bytes].push_back(block);
    trim();
  }

  // Lets go of what was kept longest while there is more than steps need.
  void trim() {
    const std::size_t most = *std::max_element(most_in_use_.begin(), most_in_use_.end());
    while (kept_ > 0 && in_use_ + kept_ > most + most / kPartSpare) {
      const auto oldest =
          std::min_element(free_.begin(), free_.end(), [](const auto& a, const auto& b) {
            return a.second.front().turn < b.second.front().turn;
          });
      free_block(oldest->second.front());
      oldest->second.erase(oldest->second.begin());
      if (oldest->second.empty()) free_.erase(oldest);
    }
  }

  void free_block(const Block& block) {
    kept_ -= block.bytes;
    allow(block);
    c10::free_cpu(block.memory);
  }

  template <typename Which>
  void release(const Which& which) {
    for (auto size = free_.begin(); size != free_.end();) {
      std::erase_if(size->second, [&](const Block& block) {
        if (!which(block)) return false;
        free_block(block);
        return true;
      });
      size = size->second.empty() ? free_.erase(size) : std::next(size);
    }
  }

  std::mutex mutex_;
  std::map<std::size_t, std::vector<Block>> free_;  // by size, the first one kept longest
  std::size_t kept_ = 0, in_use_ = 0;
  std::array<std::size_t, kStepsKept + 1> most_in_use_{};  // at once, in each of the last steps
  std::int64_t step_ = 0;
  std::uint64_t turn_ = 0;
  Clock::time_point last_used_ = Clock::now();
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
void give_back_idle_memory(std::chrono::milliseconds idle) { keeper().release_if_idle(idle); }

ReusedMemoryUser::ReusedMemoryUser() { keeper().add_user(1); }
ReusedMemoryUser::~ReusedMemoryUser() { keeper().add_user(-1); }

}  // namespace backfold::torch_layer
