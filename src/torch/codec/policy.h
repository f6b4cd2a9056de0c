// SPDX-License-Identifier: Apache-2.0
//
// Which codec the user chose for which saved tensors.

#ifndef BACKFOLD_TORCH_CODEC_POLICY_H_
#define BACKFOLD_TORCH_CODEC_POLICY_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "backfold/codecs.h"
#include "torch/capture/site.h"

namespace backfold::torch_layer {

class Policy {
 public:
  static constexpr int kNone = -1;
  static constexpr std::size_t kMostRules = 64;  // bits of Path::rules

  // A rule, and whether the modules that the caller lists decide where it applies, instead of the
  // pattern of its selector.
  struct NamedRule {
    CodecRule rule;
    std::string reason;  // "Pool(block=4), biased"
    bool by_place = false;
    bool matched = false;
    bool is_strict() const {
      const bool everywhere = !by_place && rule.where.path.empty() && rule.where.op.empty() &&
                              !rule.where.type && rule.where.min_bytes == 0;
      return rule.strict && !everywhere;
    }
  };

  // Raises ValueError for a codec or a selector that is not allowed.
  void add(CodecRule rule);
  // From now on the modules that the caller lists decide where a rule applies.
  void choose_by_listing(std::size_t rule) { rules_[rule].by_place = true; }
  // Adds a codec that plans may choose. Raises ValueError if it is biased or keeps no packets.
  void offer(const Codec& codec);
  const std::vector<NamedRule>& menu() const { return menu_; }
  // The number that stands for a codec of the menu in place of a rule's.
  static int menu_rule(int codec) { return static_cast<int>(kMostRules) + codec; }
  // Whether the plan decides on packets under this rule.
  static bool is_planned(int rule) { return rule == kNone || rule >= menu_rule(0); }

  bool empty() const { return rules_.empty(); }
  const NamedRule& operator[](int rule) const {
    const auto index = static_cast<std::size_t>(rule);
    return index < kMostRules ? rules_[index] : menu_[index - kMostRules];
  }
  const std::vector<NamedRule>& rules() const { return rules_; }

  // The rules whose pattern matches a path, as a set of bits.
  std::uint64_t rules_for(const std::string& path) const;

  // The first rule that matches, or kNone. Remembers that the rule has matched. With `named`, a
  // rule that packs must name the operator.
  int rule_for(const Site& site, const Path& path, const at::Tensor& tensor, std::int64_t bytes,
               bool named);

 private:
  std::vector<NamedRule> rules_, menu_;
};

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_CODEC_POLICY_H_
