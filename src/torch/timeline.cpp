// SPDX-License-Identifier: Apache-2.0

#include "torch/timeline.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "torch/device_memory.h"

namespace backfold::torch_layer {
namespace {

bool in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

// 0 where no node runs.
std::uint64_t running_node() {
  const auto node = torch::autograd::get_current_node();
  return node ? node->sequence_nr() + 1 : 0;
}

}  // namespace

void Timeline::begin(std::int64_t step, bool watches, std::optional<c10::Device> device) {
  const std::lock_guard lock(mutex_);
  watches_ = watches;
  if (watches_) {
    watch_ = {.device = device, .seen = {}, .open = {}};
    watch_.seen.step = step;
  }
  now_.step = step;
  now_.events = 0;
  now_.carried_plain = last_.plain = plain_;
  now_.carried_held = last_.held = held_;
  now_.kept.clear();
  last_.made = 0;
  now_.most_plain = now_.most_held = now_.most_folded = last_;
  stride_ = 1;
  in_block_ = true;
}

void Timeline::end_block() {
  const std::lock_guard lock(mutex_);
  in_block_ = false;
}

void Timeline::add(const Site& site, Curve curve, std::int64_t bytes) {
  total(curve).fetch_add(bytes, std::memory_order_relaxed);
  if (curve != Curve::kHeld || !watches_.load(std::memory_order_relaxed)) return;
  const std::lock_guard lock(mutex_);
  if (watches_)
    ++watch_.seen.stays.try_emplace(&site, Stay{.from = now_.events}).first->second.held;
}

void Timeline::saved(const Site& site) {
  const std::lock_guard lock(mutex_);
  if (watches_) watch_.seen.stays.try_emplace(&site, Stay{.from = now_.events});
  note(site);
}

void Timeline::read(const Site& site, std::int64_t made) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t node = running_node();
  if (std::exchange(reader_, node) != node) last_.made = 0;
  last_.made += made;
  if (Stay* stay = watches_ ? watch_.stay_of(site) : nullptr) {
    stay->read = std::min(stay->read, now_.events);
    stay->until = now_.events + 1;
  }
  note(site);
}

void Timeline::let_go(const Site& site, Curve curve, std::int64_t bytes) {
  total(curve).fetch_sub(bytes, std::memory_order_relaxed);
  const std::lock_guard lock(mutex_);
  if (reader_ != running_node()) last_.made = 0;
  if (Stay* stay = watches_ && curve == Curve::kHeld ? watch_.stay_of(site) : nullptr;
      stay && stay->held > 0) {
    --stay->held;
    stay->until = std::max(stay->until, now_.events);
  }
  note(site);
}

void Timeline::note(const Site& site) {
  last_.plain = plain_.load(std::memory_order_relaxed);
  last_.held = held_.load(std::memory_order_relaxed);
  last_.number = now_.events++;
  last_.site = &site;
  last_.backward = !in_block_ || in_backward();
  if (watches_) watch_.event(last_);
  if (last_.number == 0 || last_.plain > now_.most_plain.plain) now_.most_plain = last_;
  if (last_.number == 0 || last_.held > now_.most_held.held) now_.most_held = last_;
  const Event& most = now_.most_folded;
  if (last_.number == 0 || last_.held + last_.made > most.held + most.made)
    now_.most_folded = last_;
  if (last_.number % stride_ != 0) return;
  if (now_.kept.size() == kMostKept) {
    stride_ *= 2;
    std::erase_if(now_.kept, [&](const Event& event) { return event.number % stride_ != 0; });
    if (last_.number % stride_ != 0) return;
  }
  now_.kept.push_back(last_);
}

void Timeline::Watch::event(const Event& event) {
  close();
  const auto memory = device_memory(device);
  const std::int64_t now = memory ? memory->now : event.held + event.made;
  const std::int64_t before = open ? open->so_far : 0;
  open = {.event = event.number, .now = now, .most = now, .so_far = std::max(before, now)};
  seen.backward = event.backward;
}

void Timeline::Watch::close() {
  if (!open) return;
  if (const auto memory = device_memory(device); memory && memory->peak > open->so_far)
    open->most = open->so_far = memory->peak;  // reached since the last event
  std::vector<Moment>& moments = seen.moments;
  const auto add = [&](const Moment& moment) {
    if (moments.empty() || moments.back().event / stride != moment.event / stride) {
      moments.push_back(moment);
    } else if (moment.most > moments.back().most) {
      moments.back() = moment;
    }
  };
  add(*open);
  if (moments.size() <= kMostKept) return;
  stride *= 2;
  for (const Moment& moment : std::exchange(moments, {})) add(moment);
}

Timeline::Stay* Timeline::Watch::stay_of(const Site& site) {
  const auto found = seen.stays.find(&site);
  return found == seen.stays.end() ? nullptr : &found->second;
}

Timeline::Watched Timeline::watched() const {
  const std::lock_guard lock(mutex_);
  Watch watch = watch_;
  watch.close();
  for (auto& [site, stay] : watch.seen.stays)
    if (stay.held > 0 || stay.until == 0) stay.until = Stay::kNever;
  return std::move(watch.seen);
}

Timeline::Recorded Timeline::recorded() const {
  const std::lock_guard lock(mutex_);
  Recorded copy = now_;
  if (copy.events == 0) return copy;
  const auto earlier = [](const Event& a, const Event& b) { return a.number < b.number; };
  for (const Event& event : {now_.most_plain, now_.most_held, now_.most_folded, last_}) {
    const auto at = std::lower_bound(copy.kept.begin(), copy.kept.end(), event, earlier);
    if (at == copy.kept.end() || at->number != event.number) copy.kept.insert(at, event);
  }
  return copy;
}

Charge::Charge(std::shared_ptr<Timeline> timeline, const Site& site, Timeline::Curve curve,
               std::int64_t bytes)
    : timeline_(std::move(timeline)), site_(&site), curve_(curve), bytes_(bytes) {
  timeline_->add(site, curve_, bytes_);
}

Charge::Charge(Charge&& other) noexcept
    : timeline_(std::move(other.timeline_)),
      site_(other.site_),
      curve_(other.curve_),
      bytes_(other.bytes_) {}

Charge& Charge::operator=(Charge&& other) noexcept {
  if (this == &other) return *this;
  end();
  timeline_ = std::move(other.timeline_);
  site_ = other.site_;
  curve_ = other.curve_;
  bytes_ = other.bytes_;
  return *this;
}

void Charge::end() {
  if (const auto timeline = std::exchange(timeline_, nullptr))
    timeline->let_go(*site_, curve_, bytes_);
}

}  // namespace backfold::torch_layer
