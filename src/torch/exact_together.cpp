// SPDX-License-Identifier: Apache-2.0

#include "torch/exact_together.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "torch/json/state.h"
#include "torch/meeting.h"
#include "torch/plan/exact_agreement.h"
#include "torch/replays.h"
#include "torch/state.h"

namespace backfold::torch_layer {
namespace {

// As for plans that round: gradients that are not those of the user's training are no entries.
bool meets(const State& state) {
  return state.planning.exact && state.together.on() && !state.together.away &&
         at::GradMode::is_enabled() && !c10::InferenceMode::is_enabled() &&
         state.guarding.pauses == 0 && !is_captured(state);
}

const char* status_of(const State& state) {
  const bool first = state.together.next_look == 0;
  switch (state.planning.products) {
    case Planning::Products::kRead:
      return "new";
    case Planning::Products::kPlanned:
      return first ? "new" : "planned";  // a plan of its own, from before it was one of several
    default:
      return "waits";
  }
}

void make_plan(State& state) {
  Planning& planning = state.planning;
  look_at_link(state);
  Json message = tables_as_json(tables_of(state), state.policy);
  message["knows"] = std::string(status_of(state)) != "waits";
  std::vector<Tables> ranks;
  for (const Json& one : meet(state, "what its products take", std::move(message)))
    if (one.at("knows").get<bool>()) ranks.push_back(tables_from_json(one, state.policy));
  const ExactAgreement agreed = agree_exactly(ranks, *planning.exact);
  state.sites->take_choices({}, {agreed.remade.begin(), agreed.remade.end()},
                            {agreed.sent.begin(), agreed.sent.end()});
  for (Site& site : state.sites->sites()) site.stuck |= agreed.stuck.contains(site.name);
  planning.reference.ms_per_sent_byte = agreed.ms_per_sent_byte;
  planning.remade = agreed.plan;
  if (planning.products == Planning::Products::kRead)
    planning.products = Planning::Products::kPlanned;
  note_sends(state);
}

}  // namespace

void plan_exactly_together(State& state) {
  if (!meets(state)) return;
  Together& together = state.together;
  settle_peak(state);
  settle_products(state);
  count_entry(state);
  if (together.entries < together.next_look) return;
  const std::vector<Json> heard = meet(state, "what is new", {{"status", status_of(state)}});
  const auto any = [&](const char* status) {
    return std::any_of(heard.begin(), heard.end(),
                       [&](const Json& one) { return one.at("status") == status; });
  };
  const bool waits = any("waits"), plans = any("new");
  if (waits && together.fruitless++ < kPatience) {
    together.next_look = together.entries + 1;
    return;
  }
  if (plans) make_plan(state);
  if (!waits) together.fruitless = 0;
  plan_next_look(together, plans);
}

}  // namespace backfold::torch_layer
