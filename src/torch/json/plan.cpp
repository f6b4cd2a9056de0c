// SPDX-License-Identifier: Apache-2.0
//
// The plan alone, as users save it, read it and write it.

#include <algorithm>
#include <map>
#include <set>
#include <string>

#include "torch/json/site.h"
#include "torch/json/state.h"

namespace backfold::torch_layer {
namespace {

// Whether a plan gave a derived site a packet of its own, which the next step will make.
bool is_planned_apart(const Site& site) {
  return site.derived && site.root->choice && site.choice->bits > site.root->choice->bits;
}

std::vector<std::string> names_in(const Json& plan, const char* list) {
  if (!plan.contains(list)) return {};
  const Json& names = plan[list];
  TORCH_CHECK_VALUE(
      names.is_array() && std::all_of(names.begin(), names.end(),
                                      [](const Json& name) { return name.is_string(); }),
      "plan: '", list, "' must be a list of site names, got ", names.dump());
  return names.get<std::vector<std::string>>();
}

}  // namespace

std::string plan_as_json(const State& state) {
  std::map<std::string_view, const Site*> planned;  // by name: the order of sight must not matter
  for (const Site& site : state.sites->sites())
    if (site.choice && (!site.root || is_planned_apart(site))) planned.emplace(site.name, &site);
  Json sites = Json::object();
  for (const auto& [name, site] : planned) {
    Json described = choice_as_json(*site->choice, state.policy);
    described["elements"] = site->reference.elements;
    described["estimate"] = name_of(site->sensitivity.estimate);
    described["error"] = as_json(error_at(site->sensitivity, site->choice->bits));
    sites[std::string(name)] = std::move(described);
  }
  // The width of sites that are not listed.
  const Json bits = state.options.bits ? Json(*state.options.bits) : Json();
  std::set<std::string> remade, sent;
  for (const Site& site : state.sites->sites()) {
    if (site.remade) remade.insert(site.name);
    if (site.sent) sent.insert(site.name);
  }
  Json plan{{"bits", bits}, {"sites", sites}};
  if (!remade.empty()) plan["remade"] = remade;
  if (!sent.empty()) plan["offloaded"] = sent;
  return plan.dump(2);
}

void take_plan(State& state, std::string_view json) {
  const Json plan = parse_object(json, "plan");
  const auto given = [&](const char* name) { return plan.contains(name) ? plan[name] : Json(); };
  TORCH_CHECK_VALUE(given("sites").is_object() && given("bits").is_number_integer(),
                    "plan must hold 'bits', an int, and 'sites', an object keyed by site name");
  std::vector<std::pair<std::string, Choice>> choices;
  for (const auto& [name, site] : plan["sites"].items())
    choices.emplace_back(name, choice_from_json(name, site, state.policy));
  const int bits = plan["bits"].get<int>();
  TORCH_CHECK_VALUE(is_width(bits), "plan: bits must be one of ", list_code_widths(), ", got ",
                    bits);
  const std::vector<std::string> remade = names_in(plan, "remade");
  const std::vector<std::string> sent = names_in(plan, "offloaded");
  TORCH_CHECK_VALUE(sent.empty() || state.offloading != State::Offloading::kNothing,
                    "plan: ", sent.size(), " places are offloaded, which offload=False rules out");
  state.sites->take_choices(std::move(choices), remade, sent);
  state.planning.sends = !sent.empty();
  if (!remade.empty()) state.planning.products = Planning::Products::kPlanned;
  state.options.bits = bits;
  state.options.adaptive = true;
  state.options.bytes_first = true;  // it may have been made for a budget
  state.planning.target.reset();
}

}  // namespace backfold::torch_layer
