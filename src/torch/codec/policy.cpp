// SPDX-License-Identifier: Apache-2.0

#include "torch/codec/policy.h"

#include <c10/util/Exception.h>
#include <fnmatch.h>

namespace backfold::torch_layer {
namespace {

bool matches(const std::string& pattern, const std::string& name) {
  return fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
}

}  // namespace

void Policy::add(CodecRule rule) {
  TORCH_CHECK_VALUE(rules_.size() < kMostRules, "codec must have at most ", kMostRules,
                    " selectors");
  check_selector(rule.where);
  check_codec(rule.codec);
  std::string reason = describe(rule.codec) + (is_biased(rule.codec) ? ", biased" : "");
  rules_.push_back({std::move(rule), std::move(reason), false, false});
}

void Policy::offer(const Codec& codec) {
  check_codec(codec);
  const bool offered = std::holds_alternative<codecs::PoolResidual>(codec) ||
                       std::holds_alternative<codecs::Project>(codec) ||
                       std::holds_alternative<codecs::RunningRange>(codec);
  TORCH_CHECK_VALUE(offered, "menu must hold PoolResidual, Project or RunningRange, got ",
                    describe(codec),
                    is_biased(codec) ? ", a biased codec, which only codec= can choose" : "");
  menu_.push_back({{{}, codec}, describe(codec), false, false});
}

std::uint64_t Policy::rules_for(const std::string& path) const {
  std::uint64_t rules = 0;
  for (std::size_t i = 0; i < rules_.size(); ++i) {
    const NamedRule& one = rules_[i];
    if (!one.by_place && !one.rule.where.path.empty() && matches(one.rule.where.path, path))
      rules |= std::uint64_t{1} << i;
  }
  return rules;
}

int Policy::rule_for(const Site& site, const Path& path, const at::Tensor& tensor,
                     std::int64_t bytes, bool named) {
  for (std::size_t i = 0; i < rules_.size(); ++i) {
    NamedRule& one = rules_[i];
    const Selector& where = one.rule.where;
    if ((one.by_place || !where.path.empty()) && !(path.rules >> i & 1)) continue;
    if (!where.op.empty() && !matches(where.op, site.op->name)) continue;
    if (where.type && *where.type != tensor.scalar_type()) continue;
    if (bytes < where.min_bytes) continue;
    if (named && where.op.empty() && !std::holds_alternative<codecs::Keep>(one.rule.codec))
      continue;
    one.matched = true;
    return static_cast<int>(i);
  }
  return kNone;
}

}  // namespace backfold::torch_layer
