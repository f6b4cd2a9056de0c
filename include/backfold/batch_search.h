// SPDX-License-Identifier: Apache-2.0
//
// Batch search: the largest batch whose training step fits into memory, in a bounded number of
// trials.
//
//   BatchSearch search({.limit = 16'000'000'000});
//   while (const auto batch = search.next()) {
//     const auto [fits, peak] = try_steps(*batch);   // the caller's; out of memory does not fit
//     search.tried(*batch, fits, peak);
//   }
//   use(search.largest());
//
// A step's peak is close to a straight line over its batch, so two batches that fit tell where the
// limit will be met; the next trial goes there. Where no limit is known, or the line was wrong, the
// batch grows up to four times a trial until one does not fit, and the gap between the largest that
// fits and the smallest that does not is cut in half.

#ifndef BACKFOLD_BATCH_SEARCH_H_
#define BACKFOLD_BATCH_SEARCH_H_

#include <cstdint>
#include <optional>

#include "backfold/status.h"

namespace backfold {

struct BatchSearchOptions {
  std::int64_t start = 8;     // the first batch to try; 1 or more
  std::int64_t multiple = 1;  // batches are multiples of this, but for a first one that is smaller
  std::int64_t limit = 0;     // bytes that a step may take at its peak; 0 if only trials tell
  int trials = 12;            // at most; 1 or more
};

// Names the first option that is not allowed.
Status validate(const BatchSearchOptions& options);

class BatchSearch {
 public:
  // The options must be valid.
  explicit BatchSearch(const BatchSearchOptions& options) : options_(options) {}

  // The batch to try next. None once the largest is known to one part in 32, or after the last
  // trial.
  std::optional<std::int64_t> next() const;

  // A batch was tried. `peak` is what its step took, in bytes, if that is known and not 0. A step
  // above the limit does not fit, whatever `fits` says.
  void tried(std::int64_t batch, bool fits, std::int64_t peak);

  // The largest batch that fits; none if no batch did.
  std::optional<std::int64_t> largest() const;

 private:
  struct Point {
    std::int64_t batch = 0, peak = 0;
  };

  std::int64_t finest() const;
  std::optional<std::int64_t> on_the_line() const;

  BatchSearchOptions options_;
  int trials_ = 0;
  Point below_, largest_;          // the two largest that fit; a batch of 0 if there are none
  std::int64_t smallest_not_ = 0;  // that does not fit; 0 if there is none
};

}  // namespace backfold

#endif  // BACKFOLD_BATCH_SEARCH_H_
