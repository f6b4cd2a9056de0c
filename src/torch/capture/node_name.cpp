// SPDX-License-Identifier: Apache-2.0

#include "torch/capture/node_name.h"

#include <cstring>

namespace backfold::torch_layer {

bool is_builtin(const torch::autograd::Node& node) {
  constexpr std::string_view kGenerated = "N5torch8autograd9generated";  // mangled
  return std::strncmp(typeid(node).name(), kGenerated.data(), kGenerated.size()) == 0;
}

bool is_one_of(std::string_view name, std::string_view names) {
  while (!names.empty()) {
    const std::size_t end = std::min(names.find(' '), names.size());
    if (names.substr(0, end) == name) return true;
    names.remove_prefix(std::min(end + 1, names.size()));
  }
  return false;
}

}  // namespace backfold::torch_layer
