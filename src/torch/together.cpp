// SPDX-License-Identifier: Apache-2.0

#include "torch/together.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <set>
#include <utility>

#include "torch/introduction.h"
#include "torch/json/state.h"
#include "torch/meeting.h"
#include "torch/plan/bundles.h"
#include "torch/plan/combine.h"
#include "torch/plan/remaking.h"
#include "torch/plan/sample_plan.h"
#include "torch/state.h"

namespace backfold::torch_layer {
namespace {

// Turns in a row that may fail because some process saved nothing.
constexpr int kMostFruitless = 8;
constexpr std::int64_t kMostBetweenLooks = 100;

// Whether this process has met tensors since the last meeting that no plan knows.
bool has_met_unknown_sites(const State& state) {
  if (!state.planning.plan) return false;
  const auto& sites = state.sites->sites();
  return std::any_of(sites.begin(), sites.end(), [&](const Site& site) {
    const std::int64_t step = site.ledger.lossy.elements > 0 ? site.ledger.step : site.lossy_step;
    return !site.root && !site.tried && step > state.together.last;
  });
}

const char* status_of(const State& state, const Recorded& recorded) {
  if (state.together.dropped) return "dropped";
  if (!state.turns.waits) return "nothing";
  switch (recorded.what) {
    case Recorded::What::kNothing:
      return has_arrived(state, recorded) ? "own" : "waits";
    case Recorded::What::kWaiting:
      return "waits";
    case Recorded::What::kComplete:
      return "complete";
    case Recorded::What::kBroken:
      return "broken";
  }
  return "nothing";
}

// Until there is a plan each process decides by what its own products take. All run the same ones
// again, so that what they measure fits together.
void share_marks(State& state) {
  if (state.together.entries != 2 || state.planning.plan ||
      state.planning.products == Planning::Products::kUnwanted)
    return;
  settle_products(state);
  Json mine = Json::array();
  for (const Site* site : marked_now(*state.sites)) mine.push_back(site->name);
  std::set<std::string> remade;
  for (const Json& one : meet(state, "what its products make again", {{"remade", mine}}))
    for (const Json& name : one.at("remade")) remade.insert(name.get<std::string>());
  for (Site& site : state.sites->sites()) site.remade = remade.contains(site.name);
}

void watch_again(State& state) {
  forget_turn(state);
  state.turns.again = true;
}

}  // namespace

void join(State& state, int rank, int size, Gather gather) {
  TORCH_CHECK_VALUE(size >= 1, "world_size must be 1 or more, got ", size);
  TORCH_CHECK_VALUE(rank >= 0 && rank < size, "rank must be from 0 to ", size - 1, ", got ", rank);
  state.together.rank = rank;
  state.together.size = size;
  state.together.gather = std::move(gather);
}

void count_entry(State& state) {
  ++state.together.entries;
  if (std::exchange(state.together.introduced, true)) return;
  const Json mine = introduction_of(state);
  const std::vector<Json> heard = meet(state, "its model", mine);
  for (std::size_t rank = 1; rank < heard.size(); ++rank) {
    const std::string difference = difference_between(heard[0], heard[rank], rank);
    TORCH_CHECK_VALUE(difference.empty(),
                      "processes that plan together must train the same model with the same "
                      "options, but ",
                      difference, "; use sync=False to let each process plan on its own");
  }
}

void plan_next_look(Together& together, bool after_plan) {
  together.between_looks =
      after_plan ? kFirstLook : std::min(2 * together.between_looks, kMostBetweenLooks);
  together.next_look = together.entries + together.between_looks;
}

Resolution resolve_together(State& state, const Recorded& recorded) {
  Together& together = state.together;
  share_marks(state);
  if (!together.pending) return {};
  const std::vector<Json> heard =
      meet(state, "the step it watched",
           {{"status", status_of(state, recorded)}, {"obstacle", recorded.obstacle}});
  const auto says = [](const char* status) {
    return [status](const Json& one) { return one.at("status") == status; };
  };
  const auto any = [&](const char* status) {
    return std::any_of(heard.begin(), heard.end(), says(status));
  };
  if (any("dropped")) {
    watch_again(state);
    return {};
  }
  if (any("waits") && together.entries - together.begun < kPatience) return {};
  together.pending = false;
  for (std::size_t rank = 0; rank < heard.size(); ++rank)
    if (says("broken")(heard[rank]))
      return {.measure = true,
              .replay = false,
              .obstacle = of_rank(rank, heard[rank].at("obstacle").get<std::string>())};
  if (any("nothing") && ++together.fruitless <= kMostFruitless) {
    watch_again(state);
    return {};
  }
  together.fruitless = 0;
  return {.measure = true,
          .replay = std::all_of(heard.begin(), heard.end(), says("complete")),
          .obstacle = {}};
}

bool is_due_together(State& state) {
  Together& together = state.together;
  if (together.pending) return false;
  const bool listed = state.turns.again || state.turns.schedule.includes(together.entries);
  if (listed) return true;
  if (!state.planning.plan || together.entries < together.next_look) return false;
  const bool larger = state.planning.outgrown || state.planning.scores == Planning::Scores::kTaken;
  const std::vector<Json> heard =
      meet(state, "what is new", {{"unknown", has_met_unknown_sites(state)}, {"larger", larger}});
  const auto any = [&](const char* what) {
    return std::any_of(heard.begin(), heard.end(),
                       [what](const Json& one) { return one.at(what).get<bool>(); });
  };
  plan_next_look(together, false);
  if (any("unknown")) return true;
  if (any("larger")) plan_together(state);
  return false;
}

Outcome plan_together(State& state, const Failure& failure) {
  Planning& planning = state.planning;
  look_at_link(state);
  settle_products(state);
  Json message = tables_as_json(tables_of(state), state.policy);
  message["failure"] = failure.why;
  message["part"] = failure.part;
  message["memory"] = failure.memory;
  const std::vector<Json> heard = meet(state, "what it measured", std::move(message));
  Outcome outcome;
  std::vector<Tables> tables;
  std::string too_much;  // where memory did not suffice
  for (std::size_t rank = 0; rank < heard.size(); ++rank) {
    tables.push_back(tables_from_json(heard[rank], state.policy));
    const auto why = heard[rank].at("failure").get<std::string>();
    if (why.empty()) continue;
    if (heard[rank].at("memory").get<bool>())
      too_much = of_rank(rank, why);
    else if (heard[rank].at("part").get<bool>())
      outcome.whole = state.turns.again = true;
    else if (outcome.obstacle.empty())
      outcome.obstacle = of_rank(rank, why);
  }
  if (!too_much.empty() && !try_half(state.turns)) outcome.obstacle = too_much;
  const Combined combined = combine(tables);
  const auto& sites = combined.tables.sites;
  const bool measured = std::any_of(sites.begin(), sites.end(), [](const SiteRecord& site) {
    return !site.sensitivity.errors.empty();
  });
  if (!measured) return outcome;

  // The plan is made of what all agree on alone. What else this process has learned stays its own.
  const bool first = !planning.plan;
  SiteTable agreed;
  agreed.take(combined.weighted());
  const Tables& together = combined.tables;
  take_holdings(agreed, together.holdings, together.steps);
  adopt_plan(state, plan_for(*planning.target, agreed, together.reference, together.steps,
                             together.gradient_energy));
  planning.scores =
      plan_samples(agreed, state.policy) ? Planning::Scores::kKnown : Planning::Scores::kWanted;
  std::vector<SiteRecord> records = agreed.records();
  for (std::size_t i = 0; i < records.size(); ++i) {
    records[i].sensitivity = sites[i].sensitivity;
    records[i].also = sites[i].also;
    records[i].scores = at::Tensor();
  }
  state.sites->take_agreed(records);
  note_sends(state);
  if (planning.products != Planning::Products::kUnwanted)
    planning.remade = remade_by(agreed, planning.plan->held_bytes);
  // What it takes from moment to moment goes with where its own tensors are.
  StepReference own = std::exchange(planning.reference, together.reference);
  planning.reference.moments = std::move(own.moments);
  planning.gradient_energy = together.gradient_energy;
  planning.outgrown = false;
  // Errors at few bits depend on the plan in force, so the first plan is made twice.
  const int uniform = width_about(agreed, together.reference, *planning.target, together.steps);
  if (first && uniform < kNoisyBelow) state.turns.again = true;
  // So do those of what products make again, from other packets than before. Once, as for a process
  // alone.
  if (!marked_now(agreed).empty() && !std::exchange(state.turns.marked, true))
    state.turns.again = true;
  plan_next_look(state.together, true);
  return outcome;
}

void measure_together(State& state, const std::function<int()>& measure) {
  Failure failure;
  std::exception_ptr error;
  try {
    measure();
  } catch (const c10::Error& raised) {
    error = std::current_exception();
    failure.why = raised.what_without_backtrace();
  } catch (const std::exception& raised) {
    error = std::current_exception();
    failure.why = raised.what();
  }
  const Outcome outcome = plan_together(state, failure);
  if (error) std::rethrow_exception(error);
  TORCH_CHECK(outcome.obstacle.empty(), "the step could not be measured by ", outcome.obstacle);
}

void measure_and_plan(State& state, const std::function<int()>& measure) {
  if (!state.together.on()) {
    measure();
    replan(state);
    return;
  }
  state.turns.again = false;
  measure_together(state, measure);
  if (std::exchange(state.turns.again, false)) measure_together(state, measure);
}

}  // namespace backfold::torch_layer
