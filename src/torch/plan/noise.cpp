// SPDX-License-Identifier: Apache-2.0

#include "torch/plan/noise.h"

#include <algorithm>
#include <cmath>
#include <functional>

namespace backfold::torch_layer {
namespace {

// The most that folding may add, as a fraction of the gradient's own variance.
constexpr double kLimit = 0.1;
// The gradient's own share of the variance seen is never assumed to be below this.
constexpr double kLeastOwnPart = 0.05;
constexpr std::size_t kSitesNamed = 3;

// The target with `factor` times as much room: more bits or bytes, a smaller ratio.
Target widened(Target target, double factor) {
  if (target.kind == Target::Kind::kRatio) {
    target.value = std::max(1.0, target.value / factor);
  } else {
    target.value *= factor;
  }
  if (target.kind == Target::Kind::kBits) target.value = std::min(target.value, 16.0);
  return target;
}

// The least room, to a hundredth, at which a plan's error is within the allowed one.
std::optional<double> factor_needed(const std::function<bool(double)>& is_enough) {
  double low = 1, high = 1.5;
  for (; !is_enough(high); high *= 1.5) {
    if (high > 16) return std::nullopt;
    low = high;
  }
  while (high / low > 1.01) {
    const double middle = std::sqrt(low * high);
    (is_enough(middle) ? high : low) = middle;
  }
  return high;
}

std::vector<std::string> worst_sites(const SiteTable& sites) {
  std::vector<std::pair<double, std::string>> errors;
  for (const Site& site : sites.sites())
    if (site.choice && !site.sensitivity.errors.empty())
      errors.emplace_back(error_at(site.sensitivity, site.choice->bits), site.name);
  std::sort(errors.rbegin(), errors.rend());
  std::vector<std::string> names;
  for (std::size_t i = 0; i < errors.size() && i < kSitesNamed; ++i)
    names.push_back(errors[i].second);
  return names;
}

}  // namespace

std::optional<Noise> noise_of_plan(const SiteTable& sites, const StepReference& reference,
                                   const Target& target, std::int64_t step, double error,
                                   double variance) {
  const double own = std::max(variance - error, kLeastOwnPart * variance);
  if (!(own > 0)) return std::nullopt;
  Noise noise{.ratio = error / own, .sites = {}, .needed = {}};
  if (noise.ratio <= kLimit) return noise;
  noise.sites = worst_sites(sites);
  const auto factor = factor_needed([&](double room) {
    return error_for(sites, reference, widened(target, room), step) <= kLimit * own;
  });
  if (factor) noise.needed = widened(target, *factor).value;
  return noise;
}

}  // namespace backfold::torch_layer
