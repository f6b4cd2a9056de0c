// SPDX-License-Identifier: Apache-2.0

#include "torch/introduction.h"

#include <sstream>

#include "torch/state.h"

namespace backfold::torch_layer {
namespace {

std::string describe(const at::Tensor& tensor) {
  std::ostringstream text;
  text << c10::toString(tensor.scalar_type()) << ' ' << tensor.sizes();
  return text.str();
}

Json reasons(const std::vector<Policy::NamedRule>& rules) {
  Json names = Json::array();
  for (const Policy::NamedRule& rule : rules) names.push_back(rule.reason);
  return names;
}

}  // namespace

Json introduction_of(const State& state) {
  const Planning& planning = state.planning;
  const Target& target = planning.target ? *planning.target : *planning.exact;
  Json parameters = Json::object();
  for (const Parameter& parameter : state.model.parameters)
    if (!parameter.buffer)
      parameters[state.sites->landmark_name(parameter.landmark)] = describe(parameter.tensor);
  const auto& every = state.turns.schedule.every;
  Json options = {{name_of(target.kind), target.value},
                  {"probe_steps", state.turns.schedule.steps},
                  {"probe_every", every ? Json(*every) : Json()},
                  {"replay", state.turns.replays},
                  {"derive", state.options.derive},
                  {"codec", reasons(state.policy.rules())},
                  {"menu", reasons(state.policy.menu())}};
  if (!planning.target) options["bits"] = nullptr;  // it rounds nothing
  return {{"options", options}, {"parameters", parameters}};
}

std::string difference_between(const Json& first, const Json& other, std::size_t rank) {
  const std::string name = "rank " + std::to_string(rank);
  struct {
    const char* key;
    const char* what;
  } constexpr kLists[] = {{"options", "the option "}, {"parameters", "the parameter "}};
  for (const auto& [key, what] : kLists) {
    for (const auto& [entry, value] : first.at(key).items()) {
      const auto found = other.at(key).find(entry);
      if (found == other.at(key).end())
        return what + entry + " of rank 0 does not exist on " + name;
      if (*found != value)
        return what + entry + " is " + value.dump() + " on rank 0 and " + found->dump() + " on " +
               name;
    }
    for (const auto& [entry, value] : other.at(key).items())
      if (!first.at(key).contains(entry))
        return what + entry + " of " + name + " does not exist on rank 0";
  }
  return "";
}

}  // namespace backfold::torch_layer
