// SPDX-License-Identifier: Apache-2.0

#include "torch/plan/sample_plan.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "backfold/planner.h"
#include "torch/plan/plan.h"

namespace backfold::torch_layer {
namespace {

// No sample needs 16 bits, which are as good as exact.
constexpr std::size_t kWidthsInUse = kSampleWidths.size() - 1;
constexpr int kMeasuredAt = 2;

double variance(int bits) { return std::pow(std::exp2(bits) - 1, -2); }

struct Scored {
  Site* site = nullptr;
  std::vector<float> scores;
  double per_score = 0;       // error at a score of 1 and a variance of 1
  std::int64_t elements = 0;  // of one sample
};

std::vector<Scored> scored_sites(SiteTable& sites, int rule) {
  std::vector<Scored> found;
  for (Site& site : sites.sites()) {
    if (site.rule != rule || !site.memory || !site.memory->scores.defined()) continue;
    site.tried = true;
    const at::Tensor scores = site.memory->scores.cpu().nan_to_num(0, 0, 0);
    const float* values = scores.const_data_ptr<float>();
    Scored one{&site, {values, values + scores.numel()}, 0, 0};
    double sum = 0;
    for (const float score : one.scores) sum += score;
    const double error = error_at(site.sensitivity, kMeasuredAt);
    one.elements = site.reference.elements / std::max<std::int64_t>(scores.numel(), 1);
    if (sum <= 0 || error <= 0 || one.elements == 0) continue;
    one.per_score = error / (sum * variance(kMeasuredAt));
    found.push_back(std::move(one));
  }
  // The order in which sites were first seen must not matter.
  std::sort(found.begin(), found.end(),
            [](const Scored& a, const Scored& b) { return a.site->name < b.site->name; });
  return found;
}

}  // namespace

bool plan_samples(SiteTable& sites, const Policy& policy) {
  bool all_known = true;
  for (std::size_t rule = 0; rule < policy.rules().size(); ++rule) {
    const auto* codec = std::get_if<codecs::Quantize>(&policy.rules()[rule].rule.codec);
    if (!codec || !codec->per_sample) continue;
    const std::vector<Scored> scored = scored_sites(sites, static_cast<int>(rule));
    std::vector<PlanSite> menus;
    std::int64_t allowed = 0;
    for (const Scored& one : scored) {
      for (const float score : one.scores) {
        PlanSite& menu = menus.emplace_back();
        for (std::size_t i = 0; i < kWidthsInUse; ++i)
          menu.options.push_back({one.elements * kSampleWidths[i],
                                  one.per_score * score * variance(kSampleWidths[i])});
      }
      allowed += one.elements * static_cast<std::int64_t>(one.scores.size()) * codec->bits;
    }
    all_known = all_known && !menus.empty();
    if (menus.empty()) continue;
    Plan plan;
    check(backfold::make_plan(menus, allowed, &plan));
    auto choice = plan.choice.begin();
    for (const Scored& one : scored) {
      one.site->shares.fill(0);
      for (std::size_t n = 0; n < one.scores.size(); ++n)
        one.site->shares[static_cast<std::size_t>(*choice++)] +=
            1.0 / static_cast<double>(one.scores.size());
    }
  }
  return all_known;
}

}  // namespace backfold::torch_layer
