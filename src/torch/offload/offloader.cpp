// SPDX-License-Identifier: Apache-2.0

#include "torch/offload/offloader.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <unistd.h>
#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include <algorithm>

#include "torch/codec/codec.h"
#include "torch/store/geometry.h"
#include "torch/streams.h"

namespace backfold::torch_layer {

// Its own lock is taken before the offloader's, never after it, and never beside that of another.
struct Trip::Record {
  enum class State { kHere, kLeaving, kAway, kComing };

  Record(std::shared_ptr<Trip> trip, ParcelKey key, at::Tensor payload,
         const std::optional<c10::Stream>& written_on, std::shared_ptr<AwayBytes> away)
      : trip(std::move(trip)),
        key(key),
        bytes(static_cast<std::int64_t>(payload.nbytes())),
        device(payload.device()),
        away(std::move(away)),
        tensor(std::move(payload)),
        stream(written_on) {}

  const std::shared_ptr<Trip> trip;
  const ParcelKey key;
  const std::int64_t bytes;
  const at::Device device;
  const std::shared_ptr<AwayBytes> away;
  bool ahead =
      false;  // under the offloader's lock: it is, or is to be, here before it is asked for

  std::mutex mutex;
  State state = State::kHere;
  Backing* backing = nullptr;  // where `room` is
  Room room;
  // On the device: for good, while it is leaving, or ahead; otherwise as long as a reader has it.
  at::Tensor tensor;
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> given;
  std::shared_ptr<Transfer> arrival;  // by which it came; null if it is what was sent
  std::optional<c10::Stream> stream;  // on which it was written, or allocated to be
  bool abandoned = false;             // nobody will ask
};

namespace {

ParcelKey key_of(std::uint64_t place, std::uint64_t count) {
  return place ^ (count + 1) * 0x9e3779b97f4a7c15;
}

// Tensors that go one by one leave holes in malloc's heap that the next ones do not fit into, by
// the few bytes of their alignment: with tensors of 8 MiB a process grew as if none had left. So
// the system has the pages of such holes back, now and then.
void give_holes_back(std::int64_t freed) {
#if defined(__GLIBC__)
  constexpr std::int64_t kNowAndThen = 32 << 20;
  static std::atomic<std::int64_t> since{0};
  if (since.fetch_add(freed) + freed < kNowAndThen) return;
  since = 0;
  malloc_trim(0);
#else
  static_cast<void>(freed);
#endif
}

}  // namespace

Parcel::Parcel(std::shared_ptr<Offloader> offloader, std::shared_ptr<Trip::Record> record)
    : offloader_(std::move(offloader)), record_(std::move(record)) {}
Parcel::~Parcel() { offloader_->drop(record_); }
at::Tensor Parcel::get() { return offloader_->get(record_); }

Offloader::Offloader(MakeBacking make) : make_(std::move(make)), process_(getpid()) {}

Offloader::~Offloader() {
  if (is_of_another_process()) {
    for (auto& [device, backing] : backings_) static_cast<void>(backing.release());
    return;
  }
  for (const Moving& one : moving_) {
    try {
      one.transfer->wait();
    } catch (const c10::Error&) {  // of the device: nothing is copied any more
    }
  }
}

bool Offloader::is_of_another_process() const { return getpid() != process_; }

Backing* Offloader::backing_of(const at::Device& device) {
  const std::lock_guard lock(mutex_);
  const auto known = backings_.find(device);
  if (known != backings_.end()) return known->second.get();
  return (backings_[device] = make_(device)).get();
}

Backing* Offloader::usable_backing_of(const at::Device& device) {
  try {
    return backing_of(device);
  } catch (const c10::Error& error) {
    TORCH_WARN("backfold: nothing is offloaded from ", device, ": ",
               error.what_without_backtrace());
    const std::lock_guard lock(mutex_);
    return (backings_[device] = nullptr).get();
  }
}

void Offloader::require(const at::Device& device) { backing_of(device); }

std::shared_ptr<Trip> Offloader::begin() {
  settle();
  auto trip = std::make_shared<Trip>();
  const std::lock_guard lock(mutex_);
  for (auto& [device, backing] : backings_)
    if (backing) backing->arena().trim();
  if (recorded_ && !recorded_->empty()) learned_ = recorded_;
  recorded_ = std::make_shared<Order>();
  trip->expected_ = learned_;
  trip->asked_ = recorded_;
  return trip;
}

void Offloader::make_way(std::int64_t bytes, std::int64_t most) {
  while (true) {
    std::shared_ptr<Transfer> oldest;
    {
      const std::lock_guard lock(mutex_);
      if (moving_.empty() || moving_bytes_ + bytes <= most) return;
      oldest = moving_.front().transfer;
    }
    oldest->wait();
    settle();
  }
}

std::shared_ptr<Parcel> Offloader::send(const std::shared_ptr<Trip>& trip, std::uint64_t place,
                                        at::Tensor payload,
                                        const std::optional<c10::Stream>& written_on,
                                        std::shared_ptr<AwayBytes> away, bool in_any_case) {
  const auto bytes = static_cast<std::int64_t>(payload.nbytes());
  if (bytes < kLeastBytes || is_of_another_process()) return nullptr;
  Backing* const backing = usable_backing_of(payload.device());
  if (!backing) return nullptr;
  settle();
  std::shared_ptr<Record> record;
  std::int64_t most = 2 * bytes;
  bool stays = false;
  {
    const std::lock_guard lock(mutex_);
    const ParcelKey key = key_of(place, trip->counts_[place]++);
    record = std::make_shared<Record>(trip, key, payload, written_on, std::move(away));
    trip->records_[key] = record;
    trip->sent_.emplace_back(key, bytes);
    if (const Order* order = trip->expected_.get()) {
      most = std::max(most, order->window());
      const auto first = order->find(key, 0);
      stays = !in_any_case && first && order->bytes_between(0, *first + 1) <= order->window();
    }
  }
  std::shared_ptr<Parcel> parcel(new Parcel(shared_from_this(), record));
  if (stays) return parcel;
  make_way(bytes, most);
  const auto room = backing->arena().reserve(static_cast<std::size_t>(bytes));
  if (!room) {
    tell(bytes, *backing, backing->arena().why_full());
    return parcel;
  }
  std::shared_ptr<Transfer> departure;
  try {
    departure = backing->write(payload, written_on, *room);
  } catch (const c10::Error& error) {
    backing->arena().release(*room);
    tell(bytes, *backing, error.what_without_backtrace());
    return parcel;
  }
  const std::lock_guard lock(record->mutex);
  record->state = Record::State::kLeaving;
  record->backing = backing;
  record->room = *room;
  record->away->sent += bytes;
  const std::lock_guard all(mutex_);
  moving_.push_back({record, std::move(departure)});
  moving_bytes_ += bytes;
  return parcel;
}

void Offloader::settle() {
  if (is_of_another_process()) return;
  while (true) {
    Moving ended;
    bool ahead = false;
    {
      const std::lock_guard lock(mutex_);
      if (moving_.empty() || !moving_.front().transfer->has_ended()) return;
      ended = std::move(moving_.front());
      moving_.pop_front();
      moving_bytes_ -= ended.record->bytes;
      ahead = ended.record->ahead;
    }
    finish(ended, ahead);
  }
}

void Offloader::finish(const Moving& ended, bool ahead) {
  Record& record = *ended.record;
  at::Tensor freed;
  std::string failure;
  {
    const std::lock_guard lock(record.mutex);
    if (record.state == Record::State::kLeaving) {
      failure = ended.transfer->failure();
      record.state = failure.empty() ? Record::State::kAway : Record::State::kHere;
      if (failure.empty()) {
        record.given.emplace(record.tensor.storage().getWeakStorageImpl());
        if (!ahead) freed = std::move(record.tensor);
        if (!record.abandoned) {
          record.away->left += record.bytes;
          record.trip->away_bytes_ += record.bytes;
        }
      } else {
        record.away->sent -= record.bytes;
        record.backing->arena().release(std::exchange(record.room, {}));
      }
    }
    if (record.abandoned) {
      if (record.tensor.defined()) freed = std::move(record.tensor);
      if (!record.room.empty()) record.backing->arena().release(std::exchange(record.room, {}));
    }
  }
  if (freed.defined() && record.device.is_cpu()) {
    freed.reset();
    give_holes_back(record.bytes);
  }
  if (!failure.empty()) tell(record.bytes, *record.backing, failure);
}

void Offloader::fetch(Record& record) {
  if (record.given) {
    if (auto storage = record.given->lock()) {
      record.tensor = bytes_in(c10::Storage(std::move(storage)));
      return;
    }
  }
  const c10::DeviceGuard guard(record.device);
  at::Tensor into = allocate({record.bytes}, {1}, at::kByte, record.device);
  record.arrival = record.backing->read(record.room, into);
  record.tensor = std::move(into);
  record.stream = current_stream(record.device);
  record.state = Record::State::kComing;
}

bool Offloader::look_ahead(const std::shared_ptr<Record>& record) {
  std::vector<std::shared_ptr<Record>> wanted;
  bool again_soon = false;
  {
    const std::lock_guard lock(mutex_);
    Trip& trip = *record->trip;
    trip.asked_->add(record->key, record->bytes);
    if (std::exchange(record->ahead, false)) trip.ahead_bytes_ -= record->bytes;
    if (!trip.expected_) {  // the first step: as a chain of layers would ask
      auto backwards = std::make_shared<Order>();
      for (auto one = trip.sent_.rbegin(); one != trip.sent_.rend(); ++one)
        backwards->add(one->first, one->second);
      trip.expected_ = std::move(backwards);
    }
    const Order& order = *trip.expected_;
    auto at = order.find(record->key, trip.next_);
    if (!at) {  // earlier than expected, or once more
      at = order.find(record->key, 0);
      if (!at) return false;
      trip.looked_ = 0;
    }
    trip.next_ = *at + 1;
    trip.looked_ = std::max(trip.looked_, trip.next_);
    const std::int64_t window = order.window();
    const auto take = [&](Record& one) {
      if (trip.ahead_bytes_ + one.bytes > window) return false;
      trip.ahead_bytes_ += one.bytes;
      return one.ahead = true;
    };
    if (const auto again = order.find(record->key, trip.next_);
        again && order.bytes_between(trip.next_, *again + 1) <= window)
      again_soon = take(*record);
    while (trip.looked_ < order.size() &&
           order.bytes_between(trip.next_, trip.looked_ + 1) <= window) {
      const auto known = trip.records_.find(order.key(trip.looked_));
      auto one = known == trip.records_.end() ? nullptr : known->second.lock();
      if (one && one != record && !one->ahead) {
        if (!take(*one)) break;
        wanted.push_back(std::move(one));
      }
      ++trip.looked_;
    }
  }
  for (const auto& one : wanted) {
    const std::lock_guard lock(one->mutex);
    if (one->state != Record::State::kAway || one->tensor.defined()) continue;
    // Somebody has it. To take part may wait for Python's lock, under which drop() may wait for
    // this.
    if (one->given && !one->given->expired()) continue;
    try {
      fetch(*one);
    } catch (const std::exception&) {  // whoever asks for it is told
    }
  }
  return again_soon;
}

at::Tensor Offloader::get(const std::shared_ptr<Record>& record) {
  TORCH_CHECK(
      !is_of_another_process(),
      "backfold: this process was forked after forward offloaded what backward needs, which "
      "only the process that ran forward can read. Run both in one process.");
  settle();
  at::Tensor tensor, freed;
  std::shared_ptr<Transfer> arrival;
  std::optional<c10::Stream> written_on;
  {
    const std::lock_guard lock(record->mutex);
    if (record->state == Record::State::kAway && !record->tensor.defined()) fetch(*record);
    tensor = record->tensor;
    arrival = record->arrival;
    written_on = record->stream;
  }
  const bool again_soon = look_ahead(record);
  const std::optional<c10::Stream> now = current_stream(record->device);
  std::string failure;
  if (arrival) {
    arrival->deliver();
    failure = arrival->failure();
    if (now && *now != *written_on)
      c10::impl::VirtualGuardImpl(now->device_type())
          .recordDataPtrOnStream(tensor.storage().data_ptr(), *now);
  } else if (now && *now != *written_on) {
    hand_over(tensor.storage().data_ptr(), *written_on, *now);
  }
  {
    const std::lock_guard lock(record->mutex);
    if (record->state == Record::State::kComing && record->arrival == arrival) {
      record->state = Record::State::kAway;
      record->given.emplace(tensor.storage().getWeakStorageImpl());
    }
    if (!failure.empty() && record->arrival == arrival) {
      record->given.reset();
      record->arrival.reset();
    }
    if (record->state == Record::State::kAway && (!again_soon || !failure.empty()))
      freed = std::move(record->tensor);
  }
  TORCH_CHECK(failure.empty(), "backfold: ", record->bytes,
              " bytes that backward needs could not be read back from ", record->backing->name(),
              ": ", failure);
  if (arrival && record->device.is_cpu()) give_holes_back(record->bytes);  // of gradients
  return tensor;
}

void Offloader::drop(const std::shared_ptr<Record>& record) {
  if (is_of_another_process()) return;
  {
    const std::lock_guard lock(mutex_);
    Trip& trip = *record->trip;
    if (std::exchange(record->ahead, false)) trip.ahead_bytes_ -= record->bytes;
    trip.records_.erase(record->key);
  }
  at::Tensor freed;
  {
    const std::lock_guard lock(record->mutex);
    record->abandoned = true;
    if (record->state == Record::State::kLeaving) return;  // settle() does the rest
    if (record->state == Record::State::kComing && !record->arrival->has_ended()) {
      const std::lock_guard all(mutex_);
      moving_.push_back({record, record->arrival});
      moving_bytes_ += record->bytes;
      return;
    }
    freed = std::move(record->tensor);
    if (!record->room.empty()) record->backing->arena().release(std::exchange(record->room, {}));
  }
}

void Offloader::tell(std::int64_t bytes, const Backing& backing, const std::string& why) {
  if (told_.exchange(true)) return;
  TORCH_WARN("backfold: ", bytes, " bytes could not be offloaded to ", backing.name(),
             " and stay where they are: ", why);
}

}  // namespace backfold::torch_layer
