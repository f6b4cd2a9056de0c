// SPDX-License-Identifier: Apache-2.0
//
// Sends payloads away from their device after forward made them, and has them back when backward
// asks for them.
//
//   here -> leaving -> away <-> coming
//
// A payload is here until its copy has ended, and for good where that copy cannot be made. What is
// away comes back for whoever reads it, and stays away: memory on the device is given up with the
// last reader, and a graph that is kept costs nothing there. The order in which the last backward
// asked tells what to have back early (at most Order::window() bytes of it), and what not to send
// at all, as it would be asked for first. Bytes that are leaving are bounded: who sends more waits.
//
// Parcels are owned by what autograd saved. Everything here may be called from any thread. A lock
// is held for bookkeeping alone: nobody waits for a copy under one, and no tensor is freed under
// one but its own, as an allocator may call back.

#ifndef BACKFOLD_TORCH_OFFLOAD_OFFLOADER_H_
#define BACKFOLD_TORCH_OFFLOAD_OFFLOADER_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "torch/offload/away_bytes.h"
#include "torch/offload/backing.h"
#include "torch/offload/order.h"

namespace backfold::torch_layer {

class Offloader;

// What one block sends, and what its backward is expected to ask for. Opaque but for what it
// counts.
class Trip {
 public:
  std::int64_t away_bytes() const { return away_bytes_; }

 private:
  friend class Offloader;
  friend class Parcel;
  struct Record;

  std::atomic<std::int64_t> away_bytes_{0};
  // The rest is under the offloader's lock.
  std::unordered_map<ParcelKey, std::weak_ptr<Record>> records_;
  std::unordered_map<std::uint64_t, std::uint64_t> counts_;  // of parcels, by place
  std::vector<std::pair<ParcelKey, std::int64_t>> sent_;     // in order, with their bytes
  std::shared_ptr<const Order> expected_;                    // null until there is any
  std::shared_ptr<Order> asked_;
  std::size_t next_ = 0;          // what of the expected order is asked for next
  std::size_t looked_ = 0;        // up to where it was looked ahead
  std::int64_t ahead_bytes_ = 0;  // here, or coming, before anybody asked
};

// A payload that was sent. Dies with its readers, and its room elsewhere with it.
class Parcel {
 public:
  ~Parcel();
  Parcel(const Parcel&) = delete;
  Parcel& operator=(const Parcel&) = delete;

  // The bytes, on their device and for its current stream. Raises where they cannot be had back,
  // and may then be called again.
  at::Tensor get();

 private:
  friend class Offloader;
  Parcel(std::shared_ptr<Offloader> offloader, std::shared_ptr<Trip::Record> record);

  const std::shared_ptr<Offloader> offloader_;
  const std::shared_ptr<Trip::Record> record_;
};

class Offloader : public std::enable_shared_from_this<Offloader> {
 public:
  // Smaller payloads stay: a copy has a fixed cost of several microseconds.
  static constexpr std::int64_t kLeastBytes = 1 << 16;

  using MakeBacking = std::function<std::unique_ptr<Backing>(const at::Device&)>;
  explicit Offloader(MakeBacking make = backing_for);
  // Waits for copies that are under way.
  ~Offloader();
  Offloader(const Offloader&) = delete;
  Offloader& operator=(const Offloader&) = delete;

  // Raises where nothing can be sent from that device.
  void require(const at::Device& device);

  // A block begins.
  std::shared_ptr<Trip> begin();

  // `payload` is one dimension of bytes that nobody writes to any more, and nobody else reads
  // for long. `place` is the same in every step. `away` counts it. What backward asks for first
  // stays, unless it is sent `in_any_case`. Null where it is not worth it, or there is nowhere to
  // send it: it is the caller's to keep.
  std::shared_ptr<Parcel> send(const std::shared_ptr<Trip>& trip, std::uint64_t place,
                               at::Tensor payload, const std::optional<c10::Stream>& written_on,
                               std::shared_ptr<AwayBytes> away, bool in_any_case = false);

  // Gives up memory whose copies have ended. Waits for nothing.
  void settle();
  // Waits for the oldest copies, until so many more bytes may be leaving, of `most` at once.
  void make_way(std::int64_t bytes, std::int64_t most);

  // Whether this is a process that was forked: it has neither the memory nor the threads.
  bool is_of_another_process() const;

 private:
  friend class Parcel;
  using Record = Trip::Record;
  struct Moving {
    std::shared_ptr<Record> record;
    std::shared_ptr<Transfer> transfer;
  };

  // Raises where one cannot be made; the other warns, once, and gives null.
  Backing* backing_of(const at::Device& device);
  Backing* usable_backing_of(const at::Device& device);
  // A copy has ended. `ahead`: what it was of is about to be asked for.
  void finish(const Moving& ended, bool ahead);
  at::Tensor get(const std::shared_ptr<Record>& record);
  // Begins to have it back, under its lock.
  void fetch(Record& record);
  // It is asked for now: what comes next is fetched. Whether it is itself asked for again soon.
  bool look_ahead(const std::shared_ptr<Record>& record);
  void drop(const std::shared_ptr<Record>& record);
  // Says once that something could not be sent.
  void tell(std::int64_t bytes, const Backing& backing, const std::string& why);

  const MakeBacking make_;
  const pid_t process_;
  std::mutex mutex_;
  std::unordered_map<at::Device, std::unique_ptr<Backing>> backings_;
  std::deque<Moving> moving_;  // leaving, or coming for nobody any more; oldest first
  std::int64_t moving_bytes_ = 0;
  std::shared_ptr<Order> learned_, recorded_;  // of earlier blocks; of the last one
  std::atomic<bool> told_{false};
};

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_OFFLOAD_OFFLOADER_H_
