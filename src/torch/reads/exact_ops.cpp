// SPDX-License-Identifier: Apache-2.0

#include "torch/reads/exact_ops.h"

#include <cstddef>
#include <string_view>
#include <vector>

#include "torch/reads/exact_ops_rows.h"

namespace backfold::torch_layer {

const c10::IValue& Call::operator[](std::string_view name) const {
  static const c10::IValue none;
  const auto& declared = schema_.arguments();
  for (std::size_t i = 0; i < declared.size() && i < arguments_.size(); ++i) {
    if (declared[i].name() == name) return arguments_[i];
  }
  return none;
}

c10::ArrayRef<Rule> rules() {
  static const std::vector<Rule> table = [] {
    std::vector<Rule> all = value_rules();
    const std::vector<Rule> in_place = in_place_rules();
    for (const c10::ArrayRef<Rule> part : {c10::ArrayRef<Rule>(in_place), predicate_rules(),
                                           index_rules(), geometry_rules(), function_rules()})
      all.insert(all.end(), part.begin(), part.end());
    return all;
  }();
  return table;
}

}  // namespace backfold::torch_layer
