// SPDX-License-Identifier: Apache-2.0
//
// Words for errors about bytes.

#ifndef BACKFOLD_TORCH_PLAN_WORDING_H_
#define BACKFOLD_TORCH_PLAN_WORDING_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "torch/capture/site.h"

namespace backfold::torch_layer {

// "3.25 MiB"
std::string mebibytes(std::int64_t bytes);

using SiteBytes = std::pair<const Site*, std::int64_t>;
// Names the three that take most.
std::string largest_of(std::vector<SiteBytes> sites);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PLAN_WORDING_H_
