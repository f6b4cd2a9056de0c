// SPDX-License-Identifier: Apache-2.0

#include "torch/json/state.h"

#include <string>

#include "torch/json/site.h"

namespace backfold::torch_layer {
namespace {

Json summary_as_json(const PlanSummary& plan) {
  return {{"step", plan.step},
          {"sites", plan.sites},
          {"held_bytes", plan.held_bytes},
          {"sent_bytes", plan.sent_bytes},
          {"mean_bits", as_json(plan.mean_bits)},
          {"error", as_json(plan.error)},
          {"uniform_error", as_json(plan.uniform_error)},
          {"raised", plan.raised},
          {"kept", plan.kept},
          {"peak_bytes", plan.peak_bytes ? Json(*plan.peak_bytes) : Json()}};
}

PlanSummary summary_from_json(const Fields& fields) {
  std::optional<std::int64_t> peak;
  if (!fields["peak_bytes"].is_null()) peak = fields.get<std::int64_t>("peak_bytes");
  return {.step = fields.get<std::int64_t>("step"),
          .sites = fields.get<std::int64_t>("sites"),
          .held_bytes = fields.get<std::int64_t>("held_bytes"),
          .sent_bytes = fields.get<std::int64_t>("sent_bytes"),
          .mean_bits = as_number(fields["mean_bits"], kState),
          .error = as_number(fields["error"], kState),
          .uniform_error = as_number(fields["uniform_error"], kState),
          .raised = fields.get<bool>("raised"),
          .kept = fields.get<std::vector<std::string>>("kept"),
          .peak_bytes = peak};
}

void put_reference(Json& json, const StepReference& reference) {
  json["saved_bytes"] = reference.saved_bytes;
  json["fixed_bytes"] = reference.fixed_bytes;
  json["unique_bytes"] = reference.unique_bytes;
  json["moments"] = reference.moments;
  json["margin"] = reference.margin;
}

StepReference reference_from_json(const Fields& fields) {
  return {.saved_bytes = fields.get<std::int64_t>("saved_bytes"),
          .fixed_bytes = fields.get<std::int64_t>("fixed_bytes"),
          .unique_bytes = fields.get<std::int64_t>("unique_bytes"),
          .moments = fields.get<std::vector<std::int64_t>>("moments"),
          .margin = fields.get<std::int64_t>("margin")};
}

Json peak_as_json(const PeakKeeping& peak) {
  return {{"watches", peak.watches}, {"kept", peak.kept}, {"corrections", peak.corrections}};
}

Json turns_as_json(const ProbeTurns& turns, bool pending) {
  return {
      {"last", turns.last},       {"again", turns.again || turns.watches || turns.waits || pending},
      {"replays", turns.replays}, {"whole", turns.whole},
      {"marked", turns.marked},   {"halved", turns.halved}};
}

Json meetings_as_json(const Together& together) {
  return {{"entries", together.entries},
          {"last", together.last},
          {"next_look", together.next_look},
          {"between_looks", together.between_looks}};
}

Json guard_as_json(const Guard& guard) {
  const SketchState sketch = guard.state();
  Json values = Json::array();
  for (const double value : sketch.values) values.push_back(as_json(value));
  return {{"counters", sketch.counters}, {"values", values}};
}

SketchState sketch_from_json(const Fields& fields) {
  SketchState sketch{fields.get<std::vector<std::int64_t>>("counters"), {}};
  for (const Json& value : fields["values"]) sketch.values.push_back(as_number(value, kState));
  return sketch;
}

// The contents of a state, all of it read before anything is changed.
struct ReadState {
  std::vector<SiteRecord> records;
  std::int64_t steps = 0;
  std::uint64_t seed = 0;
  std::optional<int> bits;
  StepReference reference;
  PeakKeeping peak;  // only the fields that are saved
  std::optional<PlanSummary> plan;
  std::optional<double> gradient_energy;
  bool outgrown = false, wants_scores = false;
  int products = 0;
  std::optional<SketchState> sketch;
  std::optional<ProbeTurns> turns;   // only the fields that are saved
  std::optional<Together> together;  // likewise; none of a process that was alone
};

ReadState read(const Json& json, const Policy& policy) {
  const Fields fields{json, kState};
  ReadState read;
  read.records = records_from_json(fields["sites"], policy);
  read.steps = fields.get<std::int64_t>("steps");
  read.seed = fields.get<std::uint64_t>("seed");
  if (!fields["bits"].is_null()) read.bits = fields.get<int>("bits");
  read.reference = reference_from_json(fields);
  const Fields peak = fields.within("peak");
  read.peak = {.watches = peak.get<bool>("watches"),
               .kept = peak.get<int>("kept"),
               .corrections = peak.get<int>("corrections"),
               .looked_at = read.steps,  // by the run that wrote this
               .measured = {}};
  if (!fields["plan"].is_null()) read.plan = summary_from_json(fields.within("plan"));
  if (!fields["gradient_energy"].is_null())
    read.gradient_energy = as_number(fields["gradient_energy"], kState);
  read.outgrown = fields.get<bool>("outgrown");
  read.wants_scores = fields.get<bool>("wants_scores");
  read.products = fields.get<int>("products");
  if (!fields["guard"].is_null()) read.sketch = sketch_from_json(fields.within("guard"));
  if (!fields["together"].is_null()) {
    const Fields together = fields.within("together");
    read.together.emplace();
    read.together->entries = together.get<std::int64_t>("entries");
    read.together->last = together.get<std::int64_t>("last");
    read.together->next_look = together.get<std::int64_t>("next_look");
    read.together->between_looks = together.get<std::int64_t>("between_looks");
  }
  if (fields["probe"].is_null()) return read;
  const Fields probe = fields.within("probe");
  read.turns.emplace();
  read.turns->last = probe.get<std::int64_t>("last");
  read.turns->again = probe.get<bool>("again");
  read.turns->replays = probe.get<bool>("replays");
  read.turns->whole = probe.get<bool>("whole");
  read.turns->marked = probe.get<bool>("marked");
  read.turns->halved = probe.get<int>("halved");
  return read;
}

}  // namespace

namespace {

// What a controller says that wants, or does not want, products to run again is its own business.
void take_products(State& state, int saved) {
  using Products = Planning::Products;
  Planning& planning = state.planning;
  planning.remade.reset();
  if (planning.products == Products::kUnwanted) return;
  const bool planned = saved == static_cast<int>(Products::kPlanned);
  planning.products = planned ? Products::kPlanned : Products::kWanted;
  if (planned)
    planning.remade = remade_by(*state.sites, planning.plan ? planning.plan->held_bytes : 0);
}

}  // namespace

std::string state_as_json(State& state) {
  settle_scores(state);  // pending scores are not saved
  settle_peak(state);
  settle_products(state);
  const Planning& planning = state.planning;
  Json json;
  json["steps"] = state.blocks.steps;
  json["seed"] = state.options.seed;
  json["bits"] = state.options.bits ? Json(*state.options.bits) : Json();
  put_reference(json, planning.reference);
  json["peak"] = peak_as_json(planning.peak);
  json["plan"] = planning.plan ? summary_as_json(*planning.plan) : Json();
  json["gradient_energy"] = planning.gradient_energy ? as_json(*planning.gradient_energy) : Json();
  json["outgrown"] = planning.outgrown;
  json["products"] = static_cast<int>(planning.products);
  json["wants_scores"] = planning.scores != Planning::Scores::kKnown;
  json["guard"] = state.guarding.guard ? guard_as_json(*state.guarding.guard) : Json();
  json["probe"] = planning.target ? turns_as_json(state.turns, state.together.pending) : Json();
  json["together"] = state.together.on() ? meetings_as_json(state.together) : Json();
  json["sites"] = records_as_json(state.sites->records(), state.policy);
  return json.dump();
}

void take_state(State& state, std::string_view json) {
  const ReadState read = torch_layer::read(parse_object(json, kState), state.policy);
  state.sites->check(read.records);
  std::unique_ptr<Guard> guard = guard_for(state, read.seed);
  if (read.sketch && guard) guard->load(*read.sketch);
  state.sites->take(read.records);
  state.guarding.guard = std::move(guard);
  state.blocks.steps = read.steps;
  state.options.seed = read.seed;
  state.options.bits = read.bits;
  state.planning.reference = read.reference;
  state.planning.peak = read.peak;
  state.planning.plan = read.plan;
  state.planning.gradient_energy = read.gradient_energy;
  state.planning.outgrown = read.outgrown;
  take_products(state, read.products);
  note_sends(state);
  using Scores = Planning::Scores;
  state.planning.scores = read.wants_scores ? Scores::kWanted : Scores::kKnown;
  forget_turn(state);
  // One process may continue what several began, and the other way round: steps are entries then.
  state.together.entries = read.together ? read.together->entries : read.steps;
  state.together.last = read.together ? read.together->last : read.steps;
  state.together.next_look = read.together ? read.together->next_look : 0;
  if (read.together) state.together.between_looks = read.together->between_looks;
  if (!read.turns) return;
  state.turns.last = read.turns->last;
  state.turns.again = read.turns->again;
  state.turns.replays &= read.turns->replays;
  state.turns.whole = read.turns->whole;
  state.turns.marked = read.turns->marked;
  state.turns.halved = read.turns->halved;
}

namespace {

Json holdings_as_json(const std::vector<Holding>& holdings) {
  Json list = Json::array();
  for (const Holding& one : holdings)
    list.push_back({{"site", one.site},
                    {"saves", one.saves},
                    {"held", one.held_bytes},
                    {"remade", one.remade_bytes},
                    {"kind", static_cast<int>(one.kind)},
                    {"packs", one.packs}});
  return list;
}

std::vector<Holding> holdings_from_json(const Json& json, const char* what) {
  std::vector<Holding> holdings;
  for (const Json& one : json) {
    const Fields fields{one, what};
    holdings.push_back({.site = fields.get<std::string>("site"),
                        .saves = fields.get<std::int64_t>("saves"),
                        .held_bytes = fields.get<std::int64_t>("held"),
                        .remade_bytes = fields.get<std::int64_t>("remade"),
                        .kind = static_cast<Kind>(fields.get<int>("kind")),
                        .packs = fields.get<bool>("packs")});
  }
  return holdings;
}

}  // namespace

Tables tables_of(const State& state) {
  return {.sites = state.sites->records(),
          .reference = state.planning.reference,
          .gradient_energy = state.planning.gradient_energy,
          .steps = state.blocks.steps,
          .holdings = holdings_of(*state.sites, state.blocks.steps)};
}

Json tables_as_json(const Tables& tables, const Policy& policy) {
  std::vector<SiteRecord> sites = tables.sites;
  for (SiteRecord& site : sites) site.ranges = site.norms = at::Tensor();
  const auto& energy = tables.gradient_energy;
  const auto& link = tables.reference.ms_per_sent_byte;
  Json json = {{"steps", tables.steps},
               {"gradient_energy", energy ? as_json(*energy) : Json()},
               {"sites", records_as_json(sites, policy)},
               {"holdings", holdings_as_json(tables.holdings)},
               {"ms_per_sent_byte", link ? as_json(*link) : Json()}};
  put_reference(json, tables.reference);
  return json;
}

Tables tables_from_json(const Json& json, const Policy& policy) {
  const Fields fields{json, "what another process measured"};
  Tables tables;
  tables.steps = fields.get<std::int64_t>("steps");
  tables.reference = reference_from_json(fields);
  if (!fields["gradient_energy"].is_null())
    tables.gradient_energy = as_number(fields["gradient_energy"], fields.what);
  tables.sites = records_from_json(fields["sites"], policy);
  tables.holdings = holdings_from_json(fields["holdings"], fields.what);
  if (!fields["ms_per_sent_byte"].is_null())
    tables.reference.ms_per_sent_byte = as_number(fields["ms_per_sent_byte"], fields.what);
  return tables;
}

}  // namespace backfold::torch_layer
