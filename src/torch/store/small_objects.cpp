// SPDX-License-Identifier: Apache-2.0

#include "torch/store/small_objects.h"

#include <atomic>
#include <cstdint>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

namespace backfold::torch_layer {
namespace {

constexpr std::size_t kChunkBytes = 32 << 10;  // and the alignment of a chunk
constexpr std::size_t kAlignment = 16;
constexpr std::size_t kLargest = 2048;      // larger objects are not small
constexpr std::size_t kMostSpare = 256;     // chunks
constexpr std::int64_t kFilling = 1 << 30;  // more than a chunk has room for

// The beginning of a chunk's memory.
struct alignas(kAlignment) Chunk {
  // Objects that are out; while a thread fills the chunk, kFilling less those that came back.
  std::atomic<std::int64_t> out{kFilling};
};

class Pool {
 public:
  Chunk* take() {
    {
      const std::lock_guard lock(mutex_);
      ++used_;
      if (!spare_.empty()) {
        Chunk* chunk = spare_.back();
        spare_.pop_back();
        return new (chunk) Chunk;
      }
    }
    return new (::operator new(kChunkBytes, std::align_val_t(kChunkBytes))) Chunk;
  }

  void give_back(Chunk* chunk) noexcept {
    {
      const std::lock_guard lock(mutex_);
      --used_;
      if (spare_.size() < kMostSpare) {
        spare_.push_back(chunk);  // has room: it never grows beyond what is reserved
        return;
      }
    }
    ::operator delete(chunk, std::align_val_t(kChunkBytes));
  }

  SmallChunks counts() {
    const std::lock_guard lock(mutex_);
    return {used_, spare_.size()};
  }

  Pool() { spare_.reserve(kMostSpare); }

 private:
  std::mutex mutex_;
  std::vector<Chunk*> spare_;
  std::size_t used_ = 0;
};

Pool& pool() {
  static Pool& instance = *new Pool;  // threads may outlive static destructors
  return instance;
}

void came_back(Chunk* chunk, std::int64_t objects) noexcept {
  if (chunk->out.fetch_sub(objects, std::memory_order_acq_rel) == objects) pool().give_back(chunk);
}

// The chunk that a thread fills. Needs no initialisation, so that finding it is one look-up.
struct Filling {
  Chunk* chunk;
  std::byte* next;
  std::size_t left;
  std::int64_t given;
};
thread_local Filling filling{};

void finish() noexcept {
  if (Chunk* chunk = std::exchange(filling.chunk, nullptr))
    came_back(chunk, kFilling - filling.given);
  filling = {};
}

// Ends the last chunk of a thread with it.
struct AtExit {
  ~AtExit() { finish(); }
};

[[gnu::noinline]] void begin_chunk() {
  static thread_local AtExit at_exit;
  (void)at_exit;
  finish();
  filling.chunk = pool().take();
  filling.next = reinterpret_cast<std::byte*>(filling.chunk) + sizeof(Chunk);
  filling.left = kChunkBytes - sizeof(Chunk);
}

std::size_t rounded(std::size_t bytes) { return (bytes + kAlignment - 1) & ~(kAlignment - 1); }

}  // namespace

void* allocate_small(std::size_t bytes) {
  bytes = rounded(bytes);
  if (bytes > kLargest) return ::operator new(bytes);
  Filling* mine = &filling;
  if (mine->left < bytes) begin_chunk();
  void* memory = mine->next;
  mine->next += bytes;
  mine->left -= bytes;
  ++mine->given;
  return memory;
}

void release_small(void* memory, std::size_t bytes) noexcept {
  if (rounded(bytes) > kLargest) return ::operator delete(memory);
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  came_back(reinterpret_cast<Chunk*>(address & ~(kChunkBytes - 1)), 1);
}

SmallChunks small_chunks() { return pool().counts(); }

}  // namespace backfold::torch_layer
