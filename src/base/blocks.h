// SPDX-License-Identifier: Apache-2.0
//
// Splits the elements of a codec without groups over threads.

#ifndef BACKFOLD_BASE_BLOCKS_H_
#define BACKFOLD_BASE_BLOCKS_H_

#include <algorithm>
#include <cstdint>

#include "base/bits.h"
#include "base/threads.h"

namespace backfold::core {

// Calls work(first, count) on disjoint runs of elements that cover [0, count). Runs start on
// multiples of kBitBlock, so no two threads write one byte, and are long enough to pay for starting
// a thread.
template <typename Work>
void split_elements(std::int64_t count, const Execution& execution, const Work& work) {
  constexpr std::int64_t kGrain = 65'536 / kBitBlock;
  split_over_threads((count + kBitBlock - 1) / kBitBlock, kGrain, execution,
                     [&](std::int64_t begin, std::int64_t end) {
                       const std::int64_t first = begin * kBitBlock;
                       work(first, std::min(count, end * kBitBlock) - first);
                     });
}

}  // namespace backfold::core

#endif  // BACKFOLD_BASE_BLOCKS_H_
