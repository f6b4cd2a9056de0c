// SPDX-License-Identifier: Apache-2.0
//
// Memory for the small objects that a forward leaves to its backward.
//
// A step makes thousands of them in one order and drops them in another, much later and on other
// threads. A general allocator joins and splits blocks for that, in memory that has left the
// caches. Here a thread gives one object after the other from a chunk, and a chunk is used again
// once all that it gave came back. An object keeps its chunk for as long as it lives.

#ifndef BACKFOLD_TORCH_STORE_SMALL_OBJECTS_H_
#define BACKFOLD_TORCH_STORE_SMALL_OBJECTS_H_

#include <cstddef>
#include <memory>
#include <utility>

namespace backfold::torch_layer {

// Aligned to 16 bytes. Released with the same number of bytes, by any thread.
void* allocate_small(std::size_t bytes);
void release_small(void* memory, std::size_t bytes) noexcept;

// Chunks that objects live in, on all threads, and those that wait to be used again.
struct SmallChunks {
  std::size_t used = 0, spare = 0;
};
SmallChunks small_chunks();

template <typename T>
struct SmallAllocator {
  using value_type = T;
  static_assert(alignof(T) <= 16);

  SmallAllocator() = default;
  template <typename U>
  SmallAllocator(const SmallAllocator<U>&) {}

  T* allocate(std::size_t count) { return static_cast<T*>(allocate_small(count * sizeof(T))); }
  void deallocate(T* memory, std::size_t count) noexcept {
    release_small(memory, count * sizeof(T));
  }
  bool operator==(const SmallAllocator&) const { return true; }
};

template <typename T, typename... Arguments>
std::shared_ptr<T> make_small(Arguments&&... arguments) {
  return std::allocate_shared<T>(SmallAllocator<T>(), std::forward<Arguments>(arguments)...);
}

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_STORE_SMALL_OBJECTS_H_
