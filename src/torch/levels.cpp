// SPDX-License-Identifier: Apache-2.0

#include "torch/levels.h"

#include <c10/util/Exception.h>

namespace backfold::torch_layer {
namespace {

CodecRule everywhere(const Codec& codec) { return {{}, codec, false}; }
CodecRule saved_by(const char* op, const Codec& codec) { return {{.op = op}, codec, false}; }

const std::vector<Level>& levels() {
  static const auto& table = *new std::vector<Level>{
      {"L0", std::nullopt, false},
      {"L1", 4, false},
      {"L1.1", 8, false},
      {"L1.2", 2, false},
      {"L2", 4, true},
      {"L2.1", 3, true},
      {"L2.2", 2, true},
      {"L3", 4, true, {}, true},
      {"paper-L0", std::nullopt, false},
      {"paper-L1", 4, true},
      {"paper-L2", 4, true, {}, true},
      // Checkpoints and attention are the model's. What is folded is what the checkpoints keep.
      {"paper-CB1", 4, true, {}, false, true},
      {"paper-CB2", 4, true, {}, false, true},
      {"actnn-L0", std::nullopt, false},
      {"actnn-L1", std::nullopt, false, {saved_by("aten::convolution", codecs::Quantize{4})}},
      {"actnn-L2", 4, false},
      {"actnn-L3", 2, true, {everywhere(codecs::Quantize{2, true})}},
      {"actnn-L4", 2, true, {everywhere(codecs::Quantize{2, true})}, true},
      {"actnn-L5", 2, true, {everywhere(codecs::Quantize{2, true})}, true, false, true},
      {"pooled", std::nullopt, false, {saved_by("aten::convolution", codecs::Pool{4})}},
      {"division", std::nullopt, false, {everywhere(codecs::PoolResidual{8, 2})}},
      {"mesa", std::nullopt, false, {everywhere(codecs::RunningRange{8})}},
      // The error of a product with a weight stays in the gradient of that weight.
      {"exact-project",
       std::nullopt,
       false,
       {saved_by("aten::addmm", codecs::Project{8, 2}),
        saved_by("aten::mm", codecs::Project{8, 2})}},
  };
  return table;
}

}  // namespace

const Level& level_named(const std::string& name) {
  std::string names;
  for (const Level& level : levels()) {
    if (name == level.name) return level;
    names += (names.empty() ? "" : ", ") + std::string(level.name);
  }
  TORCH_CHECK_VALUE(false, "level must be one of ", names, ", got '", name, "'");
}

}  // namespace backfold::torch_layer
