// SPDX-License-Identifier: Apache-2.0

#include "base/targets.h"

#include <hwy/highway.h>

namespace backfold::cpu {

const Targets& targets() {
  static const Targets all = [] {
    Targets found;
    // Highway's bits run from the best target to the worst. The last resort, emulated vectors, is
    // no faster than the reference and does not fuse.
    std::int64_t bits = hwy::SupportedTargets() & HWY_TARGETS & ~(HWY_EMU128 | HWY_SCALAR);
    for (; bits != 0; bits &= bits - 1) {
      const std::int64_t bit = bits & -bits;
      found.targets.push_back({target_name(bit), bit});
      found.names.push_back(found.targets.back().name);
    }
    return found;
  }();
  return all;
}

std::string_view target_name(std::int64_t bit) { return hwy::TargetName(bit); }

}  // namespace backfold::cpu
