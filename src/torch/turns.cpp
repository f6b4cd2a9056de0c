// SPDX-License-Identifier: Apache-2.0

#include "torch/turns.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "torch/plan/moments.h"
#include "torch/replays.h"
#include "torch/state.h"

namespace backfold::torch_layer {
namespace {

// Places that the plan does not know trigger a probe, but not at every step, or a model that
// differs from step to step would be measured all the time.
constexpr std::int64_t kStepsBetween = 10;
// Reading the noise waits for the GPU. A warning is not repeated at every reading.
constexpr std::int64_t kStepsBetweenLooks = 100;
constexpr std::int64_t kStepsBetweenWarnings = 1000;
// What a probe keeps at once, as a multiple of what autograd alone would keep: 1.25 to 1.35 were
// measured, tangents being the rest.
constexpr double kProbedBytes = 1.4;
// The most that it takes, for a bound that has to hold: what operators need while they run is part
// of it, and of a shallow model most. Up to 1.33 times what autograd alone would keep, and six and
// a half times the largest tensor, were measured.
constexpr double kMostProbedBytes = 1.35, kMostProbedTensors = 8;
// Where memory does not suffice, half of the batch's part is tried, down to this.
constexpr double kLeastFraction = 1.0 / 256;

void look_at_noise(State& state) {
  const std::optional<Noise> noise = noise_of(state);
  if (!noise) return;
  ProbeTurns& turns = state.turns;
  if (turns.on_noise) turns.on_noise(noise->ratio);
  const std::int64_t step = state.blocks.steps;
  if (noise->sites.empty() || state.together.rank != 0 ||
      (turns.warned && step - *turns.warned < kStepsBetweenWarnings))
    return;
  turns.warned = step;
  std::string sites;
  for (const std::string& site : noise->sites) sites += (sites.empty() ? "" : ", ") + site;
  char percent[32], needed[64] = "no width is enough";
  std::snprintf(percent, sizeof percent, "%.1f", 100 * noise->ratio);
  if (noise->needed)
    std::snprintf(needed, sizeof needed, "%s=%.4g is enough", name_of(state.planning.target->kind),
                  *noise->needed);
  TORCH_WARN(
      "backfold: folding adds ", percent,
      "% to the gradient's own variance, more than the 10% below which training is unaffected; "
      "most of it comes from ",
      sites, "; ", needed);
}

// What a step of a plan holds. Known from what a state saves, so that a run that is taken up again
// measures the same rows.
double held_bytes_wanted(const State& state) {
  const Target& target = *state.planning.target;
  const StepReference& reference = state.planning.reference;
  if (is_of_bytes(target)) return static_cast<double>(headroom(reference, target));
  if (target.kind == Target::Kind::kRatio)
    return static_cast<double>(reference.unique_bytes) / target.value;
  double elements = 0;
  for (const Site& site : state.sites->sites())
    elements += static_cast<double>(site.reference.elements);
  return static_cast<double>(reference.fixed_bytes) + elements * target.value / 8;
}

// Bytes of the largest that a step rounds.
double largest_tensor(const State& state) {
  double largest = 0;
  for (const Site& site : state.sites->sites()) {
    const Footprint& of = site.reference;
    if (of.packets > 0)
      largest = std::max(largest, static_cast<double>(of.elements * of.element_bytes / of.packets));
  }
  return largest;
}

// As `fraction` of the batch would show it. What rows of a batch have in common grows with the
// square of their number, noise with their number: a smaller part shows less of the former, and a
// plan would take the same error for a larger share of the gradient.
double energy_of(const PartEnergy& energy, double fraction) {
  if (!energy.whole || energy.share >= fraction) return energy.of_part;
  const double common = std::max(0.0, *energy.whole - energy.of_part) / (1 - energy.share);
  return energy.of_part + common * (fraction - energy.share);
}

// Gradients that are not those of the user's training, and forwards without any, are no entries.
bool meets(const State& state) {
  return state.together.on() && state.planning.target && at::GradMode::is_enabled() &&
         !c10::InferenceMode::is_enabled() && state.guarding.pauses == 0;
}

}  // namespace

bool has_arrived(const State& state, const Recorded& recorded) {
  if (recorded.what != Recorded::What::kNothing) return recorded.what != Recorded::What::kWaiting;
  return !state.probing.waiting || state.probing.waiting->backward_began();
}

ProbeSchedule make_schedule(std::vector<std::int64_t> steps, std::optional<std::int64_t> every) {
  for (const std::int64_t step : steps)
    TORCH_CHECK_VALUE(step >= 1, "probe_steps must be 1 (the first step) or more, got ", step);
  TORCH_CHECK_VALUE(!every || *every >= 1, "probe_every must be 1 or more, or None, got ", *every);
  std::sort(steps.begin(), steps.end());
  return {std::move(steps), every};
}

double fraction_now(const ProbeTurns& turns) { return std::ldexp(turns.fraction, -turns.halved); }

bool try_half(ProbeTurns& turns) {
  ++turns.halved;
  const bool worth_it = fraction_now(turns) >= kLeastFraction;
  turns.again |= worth_it;
  return worth_it;
}

bool ProbeSchedule::includes(std::int64_t step) const {
  const std::int64_t last = steps.empty() ? 0 : steps.back();
  if (step <= last || !every) return std::binary_search(steps.begin(), steps.end(), step);
  return (step - last) % *every == 0;
}

bool probe_is_due(const State& state, std::int64_t step) {
  if (!state.planning.target) return false;
  if (state.together.on()) return state.together.pending;
  if (state.turns.again || state.turns.schedule.includes(step)) return true;
  const bool unknown = state.planning.plan && has_unknown_sites(*state.sites, state.blocks.steps);
  return unknown && step - state.turns.last >= kStepsBetween;
}

Resolution resolve_turn(State& state, const Recorded& recorded) {
  if (is_captured(state)) return {};
  settle_peak(state);  // before anything is run again
  if (state.together.on()) {
    if (!meets(state)) return {};
    count_entry(state);
    return resolve_together(state, recorded);
  }
  const bool patient = state.blocks.steps - state.turns.last < kPatience;
  // In inference mode nothing is saved and nothing can be run again, so it is no step.
  if (!state.turns.waits || c10::InferenceMode::is_enabled() ||
      (patient && !has_arrived(state, recorded)))
    return {};
  const bool complete = recorded.what == Recorded::What::kComplete;
  return {.measure = true, .replay = complete, .obstacle = complete ? "" : recorded.obstacle};
}

void look_if_due(State& state) {
  if (state.planning.target && state.planning.plan &&
      state.blocks.steps % kStepsBetweenLooks == 0 && !c10::InferenceMode::is_enabled())
    look_at_noise(state);
}

bool is_due(State& state) {
  if (state.together.on()) return meets(state) && is_due_together(state);
  return !state.turns.waits && !c10::InferenceMode::is_enabled() &&
         probe_is_due(state, state.blocks.steps + 1);
}

void begin_turn(State& state, bool model_runs_again) {
  ProbeTurns& turns = state.turns;
  state.together.pending = state.together.on();
  state.together.begun = state.together.entries;
  turns.last = state.blocks.steps + 1;
  turns.again = false;
  turns.watches = true;
  auto probe = std::make_shared<Probe>(rounding_seed(state), 0, least_width(state));
  probe->begin(Probe::Pass::kUsersOwn);
  state.probing.arriving = ArrivingGradients::at(tensors_of(state.model));
  if (model_runs_again) probe->outside().expect_model();
  probe->outside().tell_of_leaves(state.probing.arriving);
  state.probing.running = std::move(probe);
  state.probing.inside_model = false;
}

ProbePart part_to_run_again(const State& state) {
  const double fraction = state.turns.fraction;
  const StepReference& reference = state.planning.reference;
  // Checkpoints keep little, and few rows might not show that a shape depends on values.
  const auto& sites = state.sites->sites();
  const bool starts =
      std::any_of(sites.begin(), sites.end(), [](const Site& s) { return s.starts; });
  const auto afforded = [&](double wanted, double at_most) -> ProbePart {
    const int halved = state.turns.halved;
    return {std::ldexp(wanted, -halved), std::ldexp(at_most, -halved)};
  };
  if (reference.unique_bytes == 0 || !state.planning.target || starts)
    return afforded(fraction, fraction);
  const bool bounded = is_of_bytes(*state.planning.target);
  const auto unique = static_cast<double>(reference.unique_bytes);
  const double taken = bounded
                           ? kMostProbedBytes * unique + kMostProbedTensors * largest_tensor(state)
                           : kProbedBytes * unique;
  const double wanted = std::min(fraction, held_bytes_wanted(state) / taken);
  return afforded(wanted, bounded ? wanted : fraction);
}

void cancel_turn(State& state) {
  state.probing.inside_model = false;
  if (!std::exchange(state.turns.watches, false)) return;
  state.turns.again = !state.together.pending;  // others wait for what comes of this turn
  state.probing.running.reset();
  state.probing.arriving.reset();
}

void end_block(State& state) {
  state.probing.inside_model = false;
  if (state.probing.running && !state.probing.owns_blocks())
    state.probing.waiting = std::exchange(state.probing.running, nullptr);
  ProbeTurns& turns = state.turns;
  turns.waits |= turns.watches && turns.last == state.blocks.steps;
  turns.watches = false;
}

void forget_turn(State& state) {
  state.turns.watches = state.turns.waits = false;
  state.together.pending = state.together.dropped = false;
  state.probing.waiting.reset();
  state.probing.arriving.reset();
}

bool settle_turn(State& state, const Recorded& recorded) {
  ProbeTurns& turns = state.turns;
  if (state.together.pending) {
    turns.watches = turns.waits = false;
    state.probing.waiting.reset();
    state.probing.arriving.reset();
    state.together.dropped = true;
    return false;
  }
  if (turns.watches || (turns.waits && !has_arrived(state, recorded))) {
    forget_turn(state);
    turns.again = true;
  }
  return turns.waits;
}

Outcome finish_turn(State& state, const Replayed& replayed) {
  state.turns.waits = false;
  int measured = replayed.measured;
  const auto probe = std::exchange(state.probing.waiting, nullptr);
  const auto arriving = std::exchange(state.probing.arriving, nullptr);
  if (probe && probe->backward_began())
    measured += probe->finish_own(replayed.rest, replayed.moved, state.probing.epsilon,
                                  arriving ? arriving->weights() : LeafWeights());
  if (replayed.energy)
    state.planning.gradient_energy = energy_of(*replayed.energy, fraction_now(state.turns));
  if (state.together.on()) return plan_together(state, replayed.failure);
  if (measured > 0) replan(state);
  const Failure& failure = replayed.failure;
  if (failure.why.empty()) return {};
  if (failure.memory) return {.obstacle = try_half(state.turns) ? "" : failure.why};
  if (failure.part) state.turns.again = true;
  return {.obstacle = failure.part ? "" : failure.why, .whole = failure.part};
}

}  // namespace backfold::torch_layer
