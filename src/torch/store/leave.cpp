// SPDX-License-Identifier: Apache-2.0
//
// What of the kept leaves its device, and when. A packet's payload does at once. A reference is to
// memory that the program has as well while it runs the operation that saves it, so it waits until
// nothing else has it.

#include <algorithm>

#include "torch/store/store.h"

namespace backfold::torch_layer {
namespace {

// Whether giving up the storage frees its memory: not that of NumPy, or of another process.
bool owns_its_memory(const c10::Storage& storage) {
  return storage.allocator() && storage.resizable();
}

// Whether something that rounds would give other values without the memory: its readers are given
// that while it is alive, and whether they are must not depend on how fast a copy is.
bool serves_rounded(const Tracked& home) {
  for (const Tracked::Packed& known : home.packets)
    if (const auto packet = known.packet.lock(); packet && !is_lossless(packet->format()))
      return true;
  const auto derived = home.value ? home.value->derived.lock() : nullptr;
  return derived && derived->effort().rounded;
}

}  // namespace

bool Store::leaves(const Site& site) const {
  return offload_.trip && (offload_.everything || site.sent);
}

Passage Store::passage_of(Site& site) const {
  if (!site.ledger.away) site.ledger.away = std::make_shared<AwayBytes>();
  return {offload_.offloader, offload_.trip, site.hash, site.ledger.away, !offload_.everything};
}

std::optional<Passage> Store::way_out(Site& site) const {
  return leaves(site) ? std::optional(passage_of(site)) : std::nullopt;
}

void Store::offer(const std::shared_ptr<Hold>& hold, Site& site, const Tracked* home) {
  if (!leaves(site)) return;
  const c10::Storage storage = hold->storage();
  if (static_cast<std::int64_t>(storage.nbytes()) >= Offloader::kLeastBytes &&
      owns_its_memory(storage))
    offered_.push_back({hold, &site, home});
}

void Store::send_offered(std::size_t most) {
  for (std::size_t left = std::min(most, offered_.size()); left > 0; --left) {
    const Offered one = std::move(offered_.front());
    offered_.pop_front();
    const auto hold = one.hold.lock();
    if (!hold) continue;
    const bool stays = one.home && serves_rounded(*one.home);
    if (stays || !hold->leave(passage_of(*one.site))) offered_.push_back(one);
  }
}

void Store::send_references() { send_offered(offered_.size()); }

}  // namespace backfold::torch_layer
