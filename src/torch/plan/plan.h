// SPDX-License-Identifier: Apache-2.0
//
// The plan: the width and grouping of every site, chosen from the measurements for the user's
// target.

#ifndef BACKFOLD_TORCH_PLAN_PLAN_H_
#define BACKFOLD_TORCH_PLAN_PLAN_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "backfold/report.h"
#include "torch/capture/site.h"

namespace backfold::torch_layer {

// What the user asked for.
struct Target {
  enum class Kind : std::uint8_t {
    kBits,    // mean width of a code over the elements of lossy tensors
    kRatio,   // bytes that autograd alone would keep / bytes held
    kBudget,  // bytes held
    kPeak,    // bytes taken at any moment of a step
  };
  Kind kind = Kind::kBits;
  double value = 4;
};

// Whether it is a number of bytes, which nothing may exceed.
inline bool is_of_bytes(const Target& target) {
  return target.kind == Target::Kind::kBudget || target.kind == Target::Kind::kPeak;
}

const char* name_of(Target::Kind kind);  // "bits", "ratio", "budget", "peak"

// The bytes of a whole step, apart from packets whose width can be chosen.
struct StepReference {
  std::int64_t saved_bytes = 0;   // tells which step is the largest
  std::int64_t fixed_bytes = 0;   // held at any width
  std::int64_t unique_bytes = 0;  // that autograd alone would keep
  // For a target of the peak: what is taken besides at each moment that matters (moments.h), and
  // what measured peaks have exceeded plans by.
  std::vector<std::int64_t> moments = {};
  std::int64_t margin = 0;
  // How long a byte takes to leave the device and come back; none where nothing may leave.
  std::optional<double> ms_per_sent_byte = {};
};

using PlanSummary = ReportPlan;

// Error energy at any width, interpolated from a table of a few.
double error_at(const Sensitivity& sensitivity, int bits);

// Whether a step was seen that tells what the target means.
bool is_known(const StepReference& reference, const Target& target);

// The width of every site until there is a plan: the widest that meets the target for the largest
// step seen, or a guess before the first step. Raises ValueError if no width meets it.
int uniform_width(const SiteTable& sites, const StepReference& reference, const Target& target,
                  std::int64_t step);

// The same, but 1 bit where no width meets the target.
int width_about(const SiteTable& sites, const StepReference& reference, const Target& target,
                std::int64_t step);

// Before the first plan: where no width of 2 bits or more meets a target of bytes, marks tensors
// that products are to make again, or that leave, until one does, as far as there are any.
void mark_until_planned(SiteTable& sites, const StepReference& reference, const Target& target,
                        std::int64_t step);

// Chooses a width and grouping for every site with a table and writes it to the site. If the plan's
// error would exceed `most`, if given, it takes up to twice what a target of bits or ratio allows.
// Where that is not enough, or not allowed, the sites that cause the error are kept unfolded. They
// count towards a budget, but not towards a target of bits or ratio.
// Where a target of bytes cannot be met by widths, or not with an error of a quarter of `energy`,
// it first marks tensors that products make again, or that leave, as few as are enough.
// A margin that makes the target impossible counts only as far as it does not.
PlanSummary make_plan(SiteTable& sites, StepReference reference, const Target& target,
                      std::int64_t step, std::optional<double> most, std::optional<double> energy);

// The error that a plan for another target would have. Changes nothing.
double error_for(const SiteTable& sites, const StepReference& reference, const Target& target,
                 std::int64_t step);

// Whether there are sites that the plan does not know and no probe has tried to measure yet.
bool has_unknown_sites(const SiteTable& sites, std::int64_t step);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PLAN_PLAN_H_
