// SPDX-License-Identifier: Apache-2.0

#include "torch/peak.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "torch/device_memory.h"
#include "torch/plan/moments.h"
#include "torch/replays.h"
#include "torch/state.h"

namespace backfold::torch_layer {
namespace {

constexpr int kEnoughKept = 2;
constexpr int kMostCorrections = 8;

const Target* peak_target(const State& state) {
  const Planning& planning = state.planning;
  const auto& target = planning.any_target();
  return target && target->kind == Target::Kind::kPeak ? &*target : nullptr;
}

std::optional<std::int64_t> measured_peak(const State& state) {
  const PeakKeeping& keeping = state.planning.peak;
  if (const auto memory = device_memory(state.blocks.device)) {
    if (!keeping.watched)
      return memory->peak > keeping.peak_before ? std::optional(memory->peak) : std::nullopt;
    // The program may have reset the allocator's own count since; what events saw is left.
    std::int64_t peak = memory->peak;
    const Timeline::Watched watched = state.timeline->watched();
    if (watched.step == state.blocks.steps)
      for (const Timeline::Moment& moment : watched.moments) peak = std::max(peak, moment.so_far);
    return peak;
  }
  const Timeline::Recorded recorded = state.timeline->recorded();
  if (recorded.step != state.blocks.steps) return std::nullopt;
  return recorded.most_folded.held + recorded.most_folded.made;
}

// What the step took, for the plans to come, if no larger one was seen.
void take_moments(State& state) {
  Planning& planning = state.planning;
  if (!planning.peak.watched || planning.peak.saved_bytes < planning.reference.saved_bytes) return;
  const Timeline::Watched watched = state.timeline->watched();
  if (watched.step == state.blocks.steps && watched.backward && !watched.moments.empty())
    note_moments(*state.sites, watched, planning.reference);
}

void correct(State& state, const Target& target, std::int64_t measured) {
  Planning& planning = state.planning;
  PeakKeeping& keeping = planning.peak;
  if (keeping.corrections == kMostCorrections) {
    keeping.watches = false;
    TORCH_WARN_ONCE("backfold: ", name_of(target.kind), "=",
                    static_cast<std::int64_t>(target.value), " bytes is not kept: after ",
                    kMostCorrections, " corrections a step still took ", measured, " bytes");
    return;
  }
  // What the step took besides its packets is known better now, which may be all that was wrong.
  if (keeping.corrections++ > 0)
    planning.reference.margin += measured - static_cast<std::int64_t>(target.value);
  planning.outgrown |= planning.plan.has_value();
  planning.marks_anew |= planning.exact || (planning.sends && !planning.plan);
}

// Bytes that the last step held and that have left, or are leaving, for a budget.
std::int64_t sent_bytes(const State& state, const Site& site) {
  const bool sends = site.sent && state.offloading == State::Offloading::kByPlan;
  return sends && site.ledger.away ? site.ledger.away->sent.load() : 0;
}

bool is_held(const State& state, const Site& site) {
  return site.ledger.step == state.blocks.steps && site.ledger.kind != Kind::kParameter;
}

// Bytes that it held and that stay on the device.
std::int64_t held_here(const State& state) {
  std::int64_t held = 0;
  for (const Site& site : state.sites->sites())
    if (is_held(state, site)) held += site.ledger.held_bytes - sent_bytes(state, site);
  return held;
}

// Marks places some of whose bytes did not leave although they were to.
void note_stuck(State& state) {
  if (state.offloading != State::Offloading::kByPlan) return;
  for (Site& site : state.sites->sites())
    if (site.sent && is_held(state, site))
      site.stuck |= sent_bytes(state, site) < site.ledger.held_bytes;
}

// What a new plan makes of tensors depends on it: one that was made from an exact tensor may need a
// packet of its own once that has one; and what is to leave may turn out to stay. So what a
// budget's plan holds is compared as well.
void settle_budget(State& state) {
  const Planning& planning = state.planning;
  const auto& target = planning.any_target();
  const bool planned = planning.target
                           ? planning.plan
                                 ? planning.plan->step < state.blocks.steps && !planning.outgrown
                                 : planning.sends
                           : planning.products == Planning::Products::kPlanned && planning.sends;
  if (!target || target->kind != Target::Kind::kBudget || !planned ||
      planning.peak.saved_bytes != planning.reference.saved_bytes)
    return;
  note_stuck(state);
  const std::int64_t held = held_here(state);
  if (static_cast<double>(held) > target->value) correct(state, *target, held);
}

}  // namespace

void begin_peak(State& state) {
  if (!peak_target(state)) return;
  const Planning& planning = state.planning;
  PeakKeeping& keeping = state.planning.peak;
  keeping.watched = keeping.watches;
  keeping.planned = !planning.reference.moments.empty() &&
                    (planning.target || planning.products == Planning::Products::kPlanned);
  if (keeping.watched) reset_device_peak(state.blocks.device);
  const auto memory = device_memory(state.blocks.device);
  keeping.peak_before = memory ? memory->peak : 0;
}

void wait_for_budget(State& state) {
  if (!state.planning.sends || !state.offloader) return;
  const auto budget = static_cast<std::int64_t>(state.planning.any_target()->value);
  state.offloader->make_way(0, std::max<std::int64_t>(0, budget - held_here(state)));
}

void settle_peak(State& state) {
  const Target* const target = peak_target(state);
  PeakKeeping& keeping = state.planning.peak;
  if (keeping.looked_at == state.blocks.steps || state.probing.owns_blocks() || is_captured(state))
    return;
  keeping.looked_at = state.blocks.steps;
  settle_budget(state);
  if (!target) return;
  keeping.measured = measured_peak(state);
  take_moments(state);
  if (!keeping.measured || static_cast<double>(*keeping.measured) <= target->value) {
    if (keeping.watched && keeping.planned && ++keeping.kept == kEnoughKept)
      keeping.watches = false;
    return;
  }
  keeping.kept = 0;
  if (!std::exchange(keeping.watches, true)) return;  // the next step says why
  if (keeping.planned) correct(state, *target, *keeping.measured);
}

}  // namespace backfold::torch_layer
