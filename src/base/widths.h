// SPDX-License-Identifier: Apache-2.0
//
// From a width at run time to code compiled for it, on the host and in CUDA kernels.

#ifndef BACKFOLD_BASE_WIDTHS_H_
#define BACKFOLD_BASE_WIDTHS_H_

#include <cstddef>

#include "backfold/widths.h"
#include "base/host_device.h"

namespace backfold::core {

// Calls work.operator()<width>() for the width of the list that `bits` is. The last one serves what
// is on no list.
BACKFOLD_ANY_CALLABLE
template <const auto& kWidths, std::size_t kIndex = 0, typename Work>
BACKFOLD_HD auto with_width(int bits, const Work& work) {
  constexpr int kBits = kWidths[kIndex];
  if constexpr (kIndex + 1 < kWidths.size())
    if (bits != kBits) return with_width<kWidths, kIndex + 1>(bits, work);
  return work.template operator()<kBits>();
}

}  // namespace backfold::core

#endif  // BACKFOLD_BASE_WIDTHS_H_
