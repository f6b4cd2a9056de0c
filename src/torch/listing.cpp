// SPDX-License-Identifier: Apache-2.0

#include "torch/listing.h"

namespace backfold::torch_layer {
namespace {

// Of the part that owns a parameter.
std::string owner_of(const std::string& parameter) {
  const std::size_t dot = parameter.rfind('.');
  return dot == std::string::npos ? "" : parameter.substr(0, dot);
}

}  // namespace

void list_model(State& state, const std::vector<ListedPart>& parts,
                const std::vector<ListedTensor>& tensors) {
  ModelListing& model = state.model;
  model.modules.clear();
  model.names_places = false;
  for (const ListedPart& part : parts) {
    const auto [known, is_new] = model.paths.try_emplace(part.path, 0);
    if (is_new) known->second = state.sites->add_path(part.path, part.keep, part.rules);
    model.names_places |= part.keep || part.rules;
    model.modules.emplace(part.identity, known->second);
  }
  model.parameters.clear();
  for (const ListedTensor& one : tensors) {
    const auto owner = model.paths.find(owner_of(one.name));
    const std::uint32_t path = owner == model.paths.end() ? 0 : owner->second;
    model.parameters.push_back({one.tensor, state.sites->landmark(one.name, path), one.buffer});
  }
  watch_gradients(state);
  model.unknown_modules = false;
}

bool wants_parts(State& state, bool compiles) {
  ModelListing& model = state.model;
  const bool wants = model.unplaced_sites || state.blocks.steps < 2;
  model.watches_modules = model.names_places || (wants && !compiles);
  if (model.watches_modules) model.unplaced_sites = false;
  return model.watches_modules;
}

}  // namespace backfold::torch_layer
