// SPDX-License-Identifier: Apache-2.0

#include "backfold/planner.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "base/checks.h"
#include "planner/search.h"

namespace backfold {
namespace {

using core::Candidate;
using core::HullStep;
using core::Menu;

// Options are sound, and the largest of all sites together are a number of bytes and of error.
Status check_sites(std::span<const PlanSite> sites) {
  std::int64_t bytes = 0;
  double error = 0;
  for (std::size_t site = 0; site < sites.size(); ++site) {
    const std::vector<PlanOption>& options = sites[site].options;
    if (options.empty()) {
      return Status::error(StatusCode::kInvalidArgument,
                           "sites[%zu].options is empty: a site needs at least one option", site);
    }
    std::int64_t most_bytes = 0;
    double most_error = 0;
    for (std::size_t option = 0; option < options.size(); ++option) {
      const PlanOption& given = options[option];
      if (given.bytes < 0) {
        return Status::error(StatusCode::kInvalidArgument,
                             "sites[%zu].options[%zu].bytes must not be negative, got %" PRId64,
                             site, option, given.bytes);
      }
      if (!std::isfinite(given.error) || given.error < 0) {
        return Status::error(
            StatusCode::kInvalidArgument,
            "sites[%zu].options[%zu].error must be finite and not negative, got %g", site, option,
            given.error);
      }
      most_bytes = std::max(most_bytes, given.bytes);
      most_error = std::max(most_error, given.error);
    }
    if (most_bytes > INT64_MAX - bytes) {
      return Status::error(StatusCode::kInvalidArgument,
                           "sites[%zu].options has one of %" PRId64
                           " bytes, which with the largest options before it exceeds 2^63 - 1",
                           site, most_bytes);
    }
    if (!std::isfinite(error + most_error)) {
      return Status::error(StatusCode::kInvalidArgument,
                           "sites[%zu].options has one of error %g, which with the largest errors "
                           "before it exceeds the range of fp64",
                           site, most_error);
    }
    bytes += most_bytes;
    error += most_error;
  }
  return Status();
}

Menu undominated(std::span<const PlanSite> sites) {
  Menu menu;
  menu.first.reserve(sites.size() + 1);
  std::vector<Candidate> sorted;
  for (const PlanSite& site : sites) {
    sorted.clear();
    for (std::size_t option = 0; option < site.options.size(); ++option) {
      const PlanOption& given = site.options[option];
      sorted.push_back({given.bytes, given.error, static_cast<int>(option)});
    }
    std::sort(sorted.begin(), sorted.end(), [](const Candidate& a, const Candidate& b) {
      if (a.bytes != b.bytes) return a.bytes < b.bytes;
      return a.error != b.error ? a.error < b.error : a.option < b.option;
    });
    const std::size_t first = menu.candidates.size();
    for (const Candidate& candidate : sorted) {
      if (menu.candidates.size() == first || candidate.error < menu.candidates.back().error) {
        menu.candidates.push_back(candidate);
      }
    }
    menu.first.push_back(menu.candidates.size());
  }
  return menu;
}

HullStep step_between(std::size_t site, std::span<const Candidate> options, int from, int to) {
  HullStep step{site, from, to};
  step.bytes = options[to].bytes - options[from].bytes;
  step.saved = options[from].error - options[to].error;
  step.slope = step.saved / static_cast<double>(step.bytes);
  return step;
}

// Slopes fall strictly within a site, as computed, so sorting keeps a site's steps in order.
std::vector<HullStep> hull_steps(const Menu& menu) {
  std::vector<HullStep> steps;
  for (std::size_t site = 0; site < menu.sites(); ++site) {
    const std::span<const Candidate> options = menu.of(site);
    const std::size_t first = steps.size();
    for (int to = 1; to < static_cast<int>(options.size()); ++to) {
      HullStep step = step_between(site, options, to - 1, to);
      while (steps.size() > first && steps.back().slope <= step.slope) {
        step = step_between(site, options, steps.back().from, to);
        steps.pop_back();
      }
      steps.push_back(step);
    }
  }
  std::sort(steps.begin(), steps.end(), [](const HullStep& a, const HullStep& b) {
    return a.slope != b.slope ? a.slope > b.slope : a.site < b.site;
  });
  return steps;
}

// Sums the candidates chosen.
Plan summed(const Menu& menu, const std::vector<int>& choice) {
  Plan plan;
  plan.choice.reserve(choice.size());
  for (std::size_t site = 0; site < choice.size(); ++site) {
    const Candidate& chosen = menu.of(site)[choice[site]];
    plan.choice.push_back(chosen.option);
    plan.bytes += chosen.bytes;
    plan.error += chosen.error;
  }
  return plan;
}

// The least error that `budget` allows when every site but `fixed` may mix two neighbours on its
// hull.
double mixed_error(const Menu& menu, std::span<const HullStep> steps, std::size_t fixed,
                   const Candidate& chosen, std::int64_t budget) {
  double error = chosen.error;
  std::int64_t left = budget - chosen.bytes;
  for (std::size_t site = 0; site < menu.sites(); ++site) {
    if (site == fixed) continue;
    error += menu.of(site).front().error;
    left -= menu.of(site).front().bytes;
  }
  if (left < 0) return HUGE_VAL;
  for (const HullStep& step : steps) {
    if (step.site == fixed) continue;
    if (step.bytes > left) return error - step.slope * static_cast<double>(left);
    error -= step.saved;
    left -= step.bytes;
  }
  return error;
}

// Bounds the optimum from below. Only the site of the split step would mix, so each of its
// candidates in turn is taken whole: this closes most of the gap that one large site leaves.
double bound_of(const Menu& menu, std::span<const HullStep> steps, std::size_t split,
                std::int64_t budget) {
  double bound = HUGE_VAL;
  const std::size_t site = steps[split].site;
  for (const Candidate& chosen : menu.of(site)) {
    bound = std::min(bound, mixed_error(menu, steps, site, chosen, budget));
  }
  return bound;
}

}  // namespace

Status make_plan(std::span<const PlanSite> sites, std::int64_t budget, Plan* result) {
  if (result == nullptr) {
    return Status::error(StatusCode::kInvalidArgument, "result must not be null");
  }
  BACKFOLD_RETURN_IF_ERROR(check_sites(sites));
  const Menu menu = undominated(sites);
  std::vector<int> choice(sites.size(), 0);
  std::int64_t bytes = summed(menu, choice).bytes;
  if (bytes > budget) {
    return Status::error(StatusCode::kInvalidArgument,
                         "budget cannot be kept: it is %" PRId64
                         " bytes, and the smallest options of all %zu sites take %" PRId64,
                         budget, sites.size(), bytes);
  }

  const std::vector<HullStep> steps = hull_steps(menu);
  std::size_t split = 0;
  while (split < steps.size() && steps[split].bytes <= budget - bytes) {
    choice[steps[split].site] = steps[split].to;
    bytes += steps[split].bytes;
    ++split;
  }
  Plan plan = summed(menu, choice);
  plan.lower_bound = plan.error;
  if (split < steps.size() && bytes < budget) {
    const bool optimal = core::improve(menu, {steps, split, bytes}, budget, choice);
    plan = summed(menu, choice);
    plan.lower_bound = plan.error;
    if (!optimal) {
      const double bound = bound_of(menu, steps, split, budget);
      plan.lower_bound = std::clamp(bound, 0.0, plan.error);
    }
  }
  *result = std::move(plan);
  return Status();
}

}  // namespace backfold
