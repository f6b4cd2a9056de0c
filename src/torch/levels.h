// SPDX-License-Identifier: Apache-2.0
//
// Levels: what GACT, ActNN and other papers do, by one name each.

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
  std::vector<CodecRule> codecs = {};  // for what is kept by another codec than the plan's
};

// Raises ValueError for a name that is no level, or one that needs what Backfold does not have yet.
const Level& level_named(const std::string& name);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_LEVELS_H_
