// SPDX-License-Identifier: Apache-2.0
//
// How much is kept for backward, from save to save and from read to read of one step.
//
// Two curves: what autograd alone would keep, each storage from its first save until the last node
// that saved it has let it go; and what is held instead, each packet and reference for as long as
// it lives on its device. What a block leaves behind, because its backward comes later or never, is
// carried over into the next step, as it is in memory.
//
// Saves, reads and what is let go are events. The peaks are those of all of them; of a long step
// only each 2nd, 4th, ... event is kept, so that memory is bounded. Events need no allocation once
// a loop is steady; a charge on the plain curve takes one, a small one, for each storage.
//
// A step that is watched also tells which part of it each site's tensors stay for, and what is
// taken from event to event: held and made, or, where the device counts, all that it has allocated.

#ifndef BACKFOLD_TORCH_TIMELINE_H_
#define BACKFOLD_TORCH_TIMELINE_H_

#include <c10/core/Device.h>

#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

namespace backfold::torch_layer {

struct Site;

// May be called from any thread: backward's are autograd's.
class Timeline {
 public:
  enum class Curve : std::uint8_t { kPlain, kHeld };

  struct Event {
    std::int64_t number = 0;     // in the step
    const Site* site = nullptr;  // that saved what is saved, read or let go
    bool backward = false;       // inside of a backward, or after the block
    std::int64_t plain = 0, held = 0;
    std::int64_t made = 0;  // decoded or made again for the node that runs now
  };

  // The last step that saved something.
  struct Recorded {
    std::int64_t step = -1;
    std::int64_t events = 0;                           // in all
    std::int64_t carried_plain = 0, carried_held = 0;  // when it began
    std::vector<Event> kept;                           // the last one and the peaks among them
    Event most_plain, most_held, most_folded;          // the last: held and made together
  };

  // Of a stretch of events the one at which most is taken, with what follows until the next event.
  struct Moment {
    std::int64_t event = 0;
    std::int64_t now = 0;     // at the event itself
    std::int64_t most = 0;    // of what is known until the next one
    std::int64_t so_far = 0;  // in the whole step until the next one
  };
  // Events in [from, until) find the tensors of a site there; the first reader asks at `read`.
  struct Stay {
    static constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
    std::int64_t from = 0, read = kNever, until = 0;
    int held = 0;  // charges that have not ended
  };
  struct Watched {
    std::int64_t step = -1;
    bool backward = false;  // the last event was in one
    std::vector<Moment> moments;
    std::unordered_map<const Site*, Stay> stays;
  };

  // A block saves something for the first time, or is over. With `watches` the step is watched;
  // `device` is the one whose allocator is asked.
  void begin(std::int64_t step, bool watches = false, std::optional<c10::Device> device = {});
  void end_block();

  // Bytes are kept from now on: part of the next event.
  void add(const Site& site, Curve curve, std::int64_t bytes);
  // Events.
  void saved(const Site& site);
  void read(const Site& site, std::int64_t made);
  void let_go(const Site& site, Curve curve, std::int64_t bytes);

  Recorded recorded() const;
  // The last step that was watched, up to now.
  Watched watched() const;

 private:
  // Of the step that is watched.
  struct Watch {
    std::optional<c10::Device> device;
    Watched seen;
    std::optional<Moment> open;  // begun by the last event
    std::int64_t stride = 1;

    void event(const Event& event);
    // Ends the open moment.
    void close();
    Stay* stay_of(const Site& site);
  };

  void note(const Site& site);
  std::atomic<std::int64_t>& total(Curve curve) { return curve == Curve::kPlain ? plain_ : held_; }

  static constexpr std::size_t kMostKept = 1024;

  mutable std::mutex mutex_;
  Recorded now_;
  // Of what is kept. Changed without the lock: the next event says what they are by then.
  std::atomic<std::int64_t> plain_{0}, held_{0};
  Event last_;
  std::uint64_t reader_ = 0;  // the node that was last given something
  std::int64_t stride_ = 1;
  bool in_block_ = false;

  std::atomic<bool> watches_{false};  // written under the lock
  Watch watch_;                       // of the last step that was
};

// Bytes that are part of a curve for as long as this lives. Must not outlive its site.
class Charge {
 public:
  Charge() = default;
  Charge(std::shared_ptr<Timeline> timeline, const Site& site, Timeline::Curve curve,
         std::int64_t bytes);
  Charge(Charge&& other) noexcept;
  Charge& operator=(Charge&& other) noexcept;
  ~Charge() { end(); }

  void end();
  Timeline& timeline() const { return *timeline_; }
  explicit operator bool() const { return timeline_ != nullptr; }

 private:
  std::shared_ptr<Timeline> timeline_;
  const Site* site_ = nullptr;
  Timeline::Curve curve_ = Timeline::Curve::kPlain;
  std::int64_t bytes_ = 0;
};

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_TIMELINE_H_
