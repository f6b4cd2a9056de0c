// SPDX-License-Identifier: Apache-2.0
//
// The plan: which width and grouping every site gets, from what was measured and what the user
// wants.

#ifndef BACKFOLD_TORCH_PLAN_PLAN_H_
#define BACKFOLD_TORCH_PLAN_PLAN_H_

#include <cstdint>
#include <optional>
#include <string>

#include "backfold/report.h"
#include "torch/capture/site.h"

namespace backfold::torch_layer {

// What the user asked for.
struct Target {
  enum class Kind : std::uint8_t {
    kBits,    // mean width of a code over the elements of lossy tensors
    kRatio,   // what autograd alone would keep, by what is held
    kBudget,  // bytes held
  };
  Kind kind = Kind::kBits;
  double value = 4;
};

const char* name_of(Target::Kind kind);  // "bits", "ratio", "budget"

// A whole step, in bytes, beside the packets whose width is a matter of choice.
struct StepReference {
  std::int64_t saved_bytes = 0;   // tells which step is the largest
  std::int64_t fixed_bytes = 0;   // held at any width
  std::int64_t unique_bytes = 0;  // what autograd alone would keep
};

using PlanSummary = ReportPlan;

// Error energy at any width, from a table of some.
double error_at(const Sensitivity& sensitivity, int bits);

// A width for every site until there is a plan: the largest that meets the target, by the largest
// step seen; before any, a guess. Raises ValueError where no width meets it.
int uniform_width(const SiteTable& sites, const StepReference& reference, const Target& target,
                  std::int64_t step);

// Chooses a width and grouping for every site with a table and writes it to the site. Where the
// plan's error would exceed `most`, the energy of the gradient itself, the sites that cause it are
// kept as they are: beyond a target of bits or ratio, inside a budget.
PlanSummary make_plan(SiteTable& sites, const StepReference& reference, const Target& target,
                      std::int64_t step, std::optional<double> most);

// The error that a plan for another target would have. Changes nothing.
double error_for(const SiteTable& sites, const StepReference& reference, const Target& target,
                 std::int64_t step);

// Sites that the plan does not know, and a probe has not yet tried to measure.
bool has_unknown_sites(const SiteTable& sites, std::int64_t step);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PLAN_PLAN_H_
