// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cmath>

#include "torch/capture/entry.h"

namespace backfold::torch_layer {
namespace {

// The most that folding may add, as a part of the gradient's own variance.
constexpr double kLimit = 0.1;

// The target with so many times as much room: more bits or bytes, a smaller ratio.
Target widened(Target target, double factor) {
  if (target.kind == Target::Kind::kRatio) {
    target.value = std::max(1.0, target.value / factor);
  } else {
    target.value *= factor;
  }
  if (target.kind == Target::Kind::kBits) target.value = std::min(target.value, 16.0);
  return target;
}

// The least value of the target, to a hundredth, whose plan has no more error than `allowed`.
std::optional<double> needed_for(const State& state, double allowed) {
  const auto is_enough = [&](double factor) {
    return error_for(*state.sites, state.reference, widened(*state.target, factor), state.steps) <=
           allowed;
  };
  double low = 1, high = 1.5;
  for (; !is_enough(high); high *= 1.5) {
    if (high > 16) return std::nullopt;
    low = high;
  }
  while (high / low > 1.01) {
    const double middle = std::sqrt(low * high);
    (is_enough(middle) ? high : low) = middle;
  }
  return widened(*state.target, high).value;
}

}  // namespace

std::unique_ptr<Guard> guard_for(const State& state, std::uint64_t seed) {
  if (!state.target || state.parameters.empty()) return nullptr;
  std::vector<at::Tensor> parameters;
  for (const Parameter& parameter : state.parameters) parameters.push_back(parameter.tensor);
  auto guard = std::make_unique<Guard>(parameters, seed);
  guard->pause(state.guard_pauses > 0);
  return guard;
}

void watch_gradients(State& state) { state.guard = guard_for(state, state.options.seed); }

void pause_guard(State& state, bool on) {
  state.guard_pauses += on ? 1 : -1;
  if (state.guard) state.guard->pause(state.guard_pauses > 0);
}

std::optional<Noise> noise_of(State& state) {
  if (!state.guard || !state.plan || !state.target) return std::nullopt;
  const auto moments = state.guard->moments();
  if (!moments) return std::nullopt;
  // The gradients that were seen carry the error of folding already.
  const double own = std::max(moments->variance - state.plan->error, 0.05 * moments->variance);
  if (!(own > 0)) return std::nullopt;
  Noise noise{.ratio = state.plan->error / own, .sites = {}, .needed = {}};
  state.noise = noise.ratio;
  if (noise.ratio <= kLimit) return noise;
  std::vector<std::pair<double, std::string>> errors;
  for (const Site& site : state.sites->sites())
    if (site.choice && !site.sensitivity.errors.empty())
      errors.emplace_back(error_at(site.sensitivity, site.choice->bits), site.name);
  std::sort(errors.rbegin(), errors.rend());
  for (std::size_t i = 0; i < errors.size() && i < 3; ++i) noise.sites.push_back(errors[i].second);
  noise.needed = needed_for(state, kLimit * own);
  return noise;
}

}  // namespace backfold::torch_layer
