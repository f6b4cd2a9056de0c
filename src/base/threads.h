// SPDX-License-Identifier: Apache-2.0
//
// Splits a range of work items over host threads.

#ifndef BACKFOLD_BASE_THREADS_H_
#define BACKFOLD_BASE_THREADS_H_

#include <cstdint>
#include <functional>

#include "backfold/execution.h"

namespace backfold::core {

// Calls work(begin, end) on disjoint ranges that cover [0, items), as many as the execution has
// threads, and returns when all are done. Ranges hold at least `grain` items, so small work stays
// on this thread. If a thread cannot be started, this one does its share.
void split_over_threads(std::int64_t items, std::int64_t grain, const Execution& execution,
                        const std::function<void(std::int64_t, std::int64_t)>& work);

}  // namespace backfold::core

#endif  // BACKFOLD_BASE_THREADS_H_
