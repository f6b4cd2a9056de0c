// SPDX-License-Identifier: Apache-2.0

#include "torch/node_name.h"

#include <cstring>
#include <mutex>
#include <typeindex>
#include <unordered_map>

namespace backfold::torch_layer {

const std::string& name_of_node(const torch::autograd::Node& node) {
  static std::mutex mutex;
  static auto& names = *new std::unordered_map<std::type_index, std::string>;
  const std::lock_guard lock(mutex);
  std::string& name = names[typeid(node)];
  if (name.empty()) name = node.name();
  return name;
}

bool is_builtin(const torch::autograd::Node& node) {
  const char* type = typeid(node).name();  // mangled: torch::autograd::generated::...
  return std::strstr(type, "5torch8autograd9generated") != nullptr;
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
