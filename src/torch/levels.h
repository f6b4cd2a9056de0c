// SPDX-License-Identifier: Apache-2.0
//
// Levels: the settings of GACT, ActNN and other papers, by name.

#ifndef BACKFOLD_TORCH_LEVELS_H_
#define BACKFOLD_TORCH_LEVELS_H_

#include <optional>
#include <string>
#include <vector>

#include "backfold/codecs.h"

namespace backfold::torch_layer {

struct Level {
  const char* name = "";
  std::optional<double> bits;          // none: only what stays exact
  bool adaptive = false;               // whether widths are planned
  std::vector<CodecRule> codecs = {};  // for tensors that the plan does not decide on
  bool offload = false;
  bool checkpoints = false;  // whether the model has to use checkpoints
  bool defragment = false;
};

// Raises ValueError for an unknown name.
const Level& level_named(const std::string& name);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_LEVELS_H_
