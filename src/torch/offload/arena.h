// SPDX-License-Identifier: Apache-2.0
//
// Room for payloads in a few large slabs of memory outside of a device.
//
// A payload takes its bytes, rounded up to a page, wherever they are free: in one stretch if there
// is one, else in several, so that neither a power of two nor a hole of the wrong size wastes any.
// Slabs grow with what is in use, and go back once a whole step did without them. Everything here
// may be called from any thread.

#ifndef BACKFOLD_TORCH_OFFLOAD_ARENA_H_
#define BACKFOLD_TORCH_OFFLOAD_ARENA_H_

#include <c10/util/SmallVector.h>

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace backfold::torch_layer {

// Memory that is taken, and given back, at once.
class Slab {
 public:
  virtual ~Slab() = default;
  Slab(const Slab&) = delete;
  Slab& operator=(const Slab&) = delete;

  char* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 protected:
  Slab(void* data, std::size_t bytes) : data_(static_cast<char*>(data)), bytes_(bytes) {}

 private:
  char* const data_;
  const std::size_t bytes_;
};

// A stretch of a slab.
struct Extent {
  Slab* slab = nullptr;
  std::size_t begin = 0, bytes = 0;

  char* data() const { return slab->data() + begin; }
};

// Where a payload is, piece by piece in its own order. The last piece may be longer than what is
// left of the payload.
using Room = c10::SmallVector<Extent, 1>;

class Arena {
 public:
  static constexpr std::size_t kPage = 4096;
  static constexpr std::size_t kLeastSlab = 4 << 20, kMostSlab = 64 << 20;

  // `make` raises where there is no memory. At most `most_bytes` are in slabs.
  using MakeSlab = std::function<std::unique_ptr<Slab>(std::size_t bytes)>;
  Arena(MakeSlab make, std::size_t most_bytes);

  // None where there is not as much room: why_full() says why.
  std::optional<Room> reserve(std::size_t bytes);
  void release(const Room& room);
  // A step begins: slabs in which nothing was since the last call go back, and where there was no
  // room, it is looked for again.
  void trim();

  std::size_t used_bytes() const;
  std::size_t slab_bytes() const;
  std::string why_full() const;

 private:
  struct Owned {
    std::unique_ptr<Slab> slab;
    std::map<std::size_t, std::size_t> free;  // bytes, by where they begin
    std::size_t used = 0;
    bool touched = true;  // since trim()
  };

  // The rest is called under the lock. take() gives a stretch of so many bytes, or where it need
  // not be whole of the most that there is up to that.
  std::optional<Extent> take(std::size_t bytes, bool whole);
  bool grow(std::size_t bytes);
  void give_back(const Room& room);

  const MakeSlab make_;
  const std::size_t most_bytes_;
  mutable std::mutex mutex_;
  std::vector<Owned> slabs_;
  std::size_t used_ = 0, total_ = 0;
  std::string why_full_;  // since trim(); empty while there may be more
};

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_OFFLOAD_ARENA_H_
