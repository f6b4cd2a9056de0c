// SPDX-License-Identifier: Apache-2.0

#include "torch/plan/wording.h"

#include <algorithm>
#include <cstdio>

namespace backfold::torch_layer {

std::string mebibytes(std::int64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f MiB", static_cast<double>(bytes) / (1 << 20));
  return text;
}

std::string largest_of(std::vector<SiteBytes> sites) {
  std::stable_sort(sites.begin(), sites.end(),
                   [](const SiteBytes& a, const SiteBytes& b) { return a.second > b.second; });
  std::string names;
  for (std::size_t i = 0; i < sites.size() && i < 3; ++i)
    names += (i ? ", " : "") + sites[i].first->name + " (" + mebibytes(sites[i].second) + ")";
  return names;
}

}  // namespace backfold::torch_layer
