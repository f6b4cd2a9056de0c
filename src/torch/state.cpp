// SPDX-License-Identifier: Apache-2.0

#include "torch/state.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "base/rng.h"
#include "torch/offload/link.h"
#include "torch/plan/bundles.h"
#include "torch/plan/exact_plan.h"
#include "torch/plan/sample_plan.h"
#include "torch/plan/starts.h"
#include "torch/replays.h"

namespace backfold::torch_layer {
namespace {

int width_about(const State& state) {
  const Planning& planning = state.planning;
  return width_about(*state.sites, planning.reference, *planning.target, state.blocks.steps);
}

int uniform_width_of(const State& state) {
  const Planning& planning = state.planning;
  // What products can spare is known after the next step.
  if (planning.products == Planning::Products::kWanted) return width_about(state);
  return uniform_width(*state.sites, planning.reference, *planning.target, state.blocks.steps);
}

// The device that what is saved leaves.
std::optional<at::Device> device_of(const State& state) {
  if (state.model.parameters.empty()) return state.blocks.saved_on;
  return state.model.parameters.front().tensor.device();
}

// Says once, when a plan says how much it is, that a budget is kept by what the user did not ask
// for.
void tell_of_sends(State& state) {
  Planning& planning = state.planning;
  const auto& target = planning.any_target();
  const bool told = planning.told_sends || (state.together.on() && state.together.rank != 0);
  if (!planning.sends || !target || told) return;
  const std::int64_t bytes = planning.plan     ? planning.plan->sent_bytes
                             : planning.remade ? planning.remade->sent_bytes
                                               : 0;
  const auto device = device_of(state);
  const auto link = bytes > 0 && device ? link_of(*device) : std::nullopt;
  if (!link) return;
  planning.told_sends = true;
  TORCH_WARN("backfold: budget=", static_cast<std::int64_t>(target->value),
             " bytes is kept by offloading ", bytes, " bytes to ", link->where,
             "; offload=False rules that out");
}

// Before the first plan.
void mark_sites(State& state) {
  Planning& planning = state.planning;
  look_at_link(state);
  mark_until_planned(*state.sites, planning.reference, *planning.target, state.blocks.steps);
  note_sends(state);
}

// Says once that the target cannot be kept, and names each place that is kept exact once.
void tell_of_noise(Planning& planning) {
  if (planning.plan->raised && !std::exchange(planning.told_raised, true))
    TORCH_WARN("backfold: with ", name_of(planning.target->kind), "=", planning.target->value,
               " rounding would drown the gradient in noise: the plan takes ",
               planning.plan->mean_bits, " bits on average, beyond what was asked for");
  std::string names;
  for (const std::string& name : planning.plan->kept)
    if (planning.told_kept.insert(name).second) names += (names.empty() ? "" : ", ") + name;
  if (names.empty()) return;
  TORCH_WARN("backfold: rounding ", names,
             " would drown the gradient in noise: kept exact, beyond what was asked for");
}

}  // namespace

std::uint64_t rounding_seed(const State& state) {
  const auto rank = static_cast<std::uint64_t>(state.together.rank);
  return rank == 0 ? state.options.seed : core::mix64(state.options.seed ^ core::mix64(rank));
}

StoreOptions options_now(State& state) {
  Planning& planning = state.planning;
  using Products = Planning::Products;
  // What was timed cannot be read, and nothing is planned anew, while a graph is captured.
  const bool plans = !state.probing.owns_blocks() && !is_captured(state);
  if (plans) {
    settle_peak(state);
    settle_products(state);
  }
  if (planning.target && plans) {
    // What a peak is not lowered by needs no products to be marked, nor does what leaves.
    const bool products = planning.target->kind == Target::Kind::kPeak
                              ? planning.products == Products::kPlanned
                              : planning.products != Products::kUnwanted;
    if (!planning.plan && !products) mark_sites(state);
    if (!planning.plan) state.options.bits = uniform_width_of(state);
    // Several processes do this at their next meeting.
    if (!state.together.on()) {
      // What a larger step takes from moment to moment is known once it was watched.
      if (planning.plan && is_known(planning.reference, *planning.target) &&
          std::exchange(planning.outgrown, false))
        replan(state);
      settle_scores(state);
    }
  }
  if (plans) tell_of_sends(state);
  StoreOptions options = state.options;
  options.seed = rounding_seed(state);
  options.sharded = state.model.sharded;
  options.spares_small =
      planning.target && planning.target->kind == Target::Kind::kBits && !planning.plan;
  if (planning.target) options.bytes_first = planning.target->kind != Target::Kind::kBits;
  // What a product reads of a shard's parameter is freed when the next operation saves its result.
  options.products = planning.products != Products::kUnwanted && !options.sharded;
  options.times_products = planning.products == Products::kWanted && !state.probing.owns_blocks();
  options.wants_scores = state.probing.running || planning.scores == Planning::Scores::kWanted;
  options.turn = next_turn(state);
  return options;
}

bool offloads(const State& state) {
  return state.offloading == State::Offloading::kEverything || state.planning.sends;
}

Offload begin_trip(State& state) {
  if (!offloads(state) || state.probing.owns_blocks()) return {};
  std::shared_ptr<Offloader>& offloader = state.offloader;
  if (!offloader || offloader->is_of_another_process()) offloader = std::make_shared<Offloader>();
  if (!state.model.parameters.empty())
    offloader->require(state.model.parameters.front().tensor.device());
  return {offloader, offloader->begin(), state.offloading == State::Offloading::kEverything};
}

void note_sends(State& state) {
  const auto& sites = state.sites->sites();
  const auto& target = state.planning.any_target();
  state.planning.sends =
      state.offloading == State::Offloading::kByPlan && target &&
      target->kind == Target::Kind::kBudget &&
      std::any_of(sites.begin(), sites.end(), [](const Site& site) { return site.sent; });
}

int least_width(const State& state) {
  // Few tensors go far below the mean.
  return state.planning.target && width_about(state) >= 4 ? 2 : 1;
}

std::optional<int> noisy_width(const State& state) {
  if (!state.planning.target) return std::nullopt;
  const int width = width_about(state);
  return width < kNoisyBelow ? std::optional(width) : std::nullopt;
}

PlanSummary plan_for(const Target& target, SiteTable& sites, const StepReference& reference,
                     std::int64_t step, std::optional<double> energy) {
  set_safe_widths(sites, target, energy);
  // The most error that a plan may expect. Gradients shrink in the first steps, and a plan that
  // meets one of its own size there drowns the next ones. Below 3 bits noise of that size is what
  // was asked for.
  constexpr double kPart = 0.25;  // half of the gradient's norm
  const bool noisy = energy && width_about(sites, reference, target, step) < kNoisyBelow;
  const auto most = energy && !noisy ? std::optional(kPart * *energy) : energy;
  return make_plan(sites, reference, target, step, most, energy);
}

void adopt_plan(State& state, PlanSummary plan) {
  Planning& planning = state.planning;
  remember(state.history.plans, {.step = plan.step,
                                 .held_bytes = plan.held_bytes,
                                 .mean_bits = plan.mean_bits,
                                 .error = plan.error,
                                 .uniform_error = plan.uniform_error,
                                 .gradient_energy = planning.gradient_energy});
  planning.plan = std::move(plan);
  note_sends(state);
  if (state.together.rank == 0) tell_of_noise(planning);  // it is the same in all processes
  state.options.bits = widest_within(planning.plan->mean_bits);
  planning.peak.watches = true;
  planning.peak.kept = 0;
}

void replan(State& state) {
  Planning& planning = state.planning;
  look_at_link(state);
  const Marked before = marked_now(*state.sites);
  adopt_plan(state, plan_for(*planning.target, *state.sites, planning.reference, state.blocks.steps,
                             planning.gradient_energy));
  if (planning.products != Planning::Products::kUnwanted)
    planning.remade = remade_by(*state.sites, planning.plan->held_bytes);
  // What is made from other packets now has another error, which the next step measures. Once:
  // plans that disagree would be made forever.
  if (marked_now(*state.sites) != before)
    state.turns.again = !std::exchange(state.turns.marked, true);
  if (!plan_samples(*state.sites, state.policy)) state.planning.scores = Planning::Scores::kWanted;
}

void look_at_link(State& state) {
  const auto& target = state.planning.any_target();
  const bool may_send = state.offloading == State::Offloading::kByPlan && target &&
                        target->kind == Target::Kind::kBudget;
  const auto device = may_send ? device_of(state) : std::nullopt;
  const auto link = device ? link_of(*device) : std::nullopt;
  state.planning.reference.ms_per_sent_byte =
      link ? std::optional(link->ms_per_byte) : std::nullopt;
}

void settle_products(State& state) {
  Planning& planning = state.planning;
  using Products = Planning::Products;
  const bool timed = planning.products == Products::kTimed;
  if (timed) read_laps(*state.sites, state.blocks.steps);
  if (!timed && !std::exchange(planning.marks_anew, false)) return;
  if (planning.exact && !is_known(planning.reference, *planning.exact)) {
    planning.products = Products::kWanted;  // its backward did not run
    return;
  }
  if (planning.exact && state.together.on()) {
    planning.products = Products::kRead;
    return;
  }
  if (planning.exact) {
    look_at_link(state);
    planning.remade =
        plan_exactly(*state.sites, planning.reference, *planning.exact, state.blocks.steps);
    note_sends(state);
  } else if (!planning.plan) {
    mark_sites(state);
  } else {
    planning.outgrown = true;  // the plan did not know these times
  }
  if (timed) planning.products = Products::kPlanned;
}

void settle_scores(State& state) {
  if (state.planning.scores != Planning::Scores::kTaken || state.together.on()) return;
  plan_samples(*state.sites, state.policy);
  state.planning.scores = Planning::Scores::kKnown;
}

std::vector<at::Tensor> tensors_of(const ModelListing& model) {
  std::vector<at::Tensor> tensors;
  for (const Parameter& parameter : model.parameters) tensors.push_back(parameter.tensor);
  return tensors;
}

std::unique_ptr<Guard> guard_for(const State& state, std::uint64_t seed) {
  if (!state.planning.target || state.model.parameters.empty()) return nullptr;
  auto guard = std::make_unique<Guard>(tensors_of(state.model), seed);
  guard->pause(state.guarding.pauses > 0);
  return guard;
}

void watch_gradients(State& state) { state.guarding.guard = guard_for(state, state.options.seed); }

void pause_guard(State& state, bool on) {
  Guarding& guarding = state.guarding;
  guarding.pauses += on ? 1 : -1;
  if (guarding.guard) guarding.guard->pause(guarding.pauses > 0);
}

std::optional<Noise> noise_of(State& state) {
  const Planning& planning = state.planning;
  if (!state.guarding.guard || !planning.plan || !planning.target) return std::nullopt;
  const auto moments = state.guarding.guard->moments();
  if (!moments) return std::nullopt;
  const auto noise = noise_of_plan(*state.sites, planning.reference, *planning.target,
                                   state.blocks.steps, planning.plan->error, moments->variance);
  if (!noise) return noise;
  state.guarding.noise = noise->ratio;
  remember(state.history.noise, {.step = state.blocks.steps, .ratio = noise->ratio});
  return noise;
}

std::string missed_checkpoints(State& state) {
  BlockHistory& blocks = state.blocks;
  if (blocks.wants_checkpoints.empty() || blocks.steps == 0) return "";
  const std::string level = std::exchange(blocks.wants_checkpoints, "");
  if (blocks.met_checkpoint) return "";
  return "backfold: level='" + level +
         "' is for a model that uses checkpoints, and the block met none: wrap its parts in "
         "torch.utils.checkpoint, or call gradient_checkpointing_enable() on a model of "
         "transformers";
}

void refuse_entered(const State& state) {
  TORCH_CHECK(state.blocks.thread == std::this_thread::get_id(),
              "this controller is entered on another thread: give each thread its own");
  TORCH_CHECK(false, "this controller is entered already: its block cannot be inside itself");
}

}  // namespace backfold::torch_layer
