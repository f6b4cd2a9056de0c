// SPDX-License-Identifier: Apache-2.0

#include "backfold/batch_search.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>

namespace backfold {
namespace {

constexpr std::int64_t kMostGrowth = 4;  // of a batch from one trial to the next
constexpr std::int64_t kFinest = 32;     // parts of a batch that are not worth a trial
constexpr std::int64_t kMostBatch = std::int64_t{1} << 48;

}  // namespace

Status validate(const BatchSearchOptions& options) {
  const auto refuse = [](const char* name, std::int64_t value) {
    return Status::error(StatusCode::kInvalidArgument, "%s must be from 1 to 2^48, got %" PRId64,
                         name, value);
  };
  const auto allowed = [](std::int64_t value) { return value >= 1 && value <= kMostBatch; };
  if (!allowed(options.start)) return refuse("start", options.start);
  if (!allowed(options.multiple)) return refuse("multiple", options.multiple);
  if (!allowed(options.trials)) return refuse("trials", options.trials);
  if (options.limit < 0)
    return Status::error(StatusCode::kInvalidArgument,
                         "limit must be a number of bytes, or 0 for none, got %" PRId64,
                         options.limit);
  return Status();
}

std::int64_t BatchSearch::finest() const {
  return std::max(options_.multiple, largest_.batch / kFinest);
}

// Where the line through the two largest batches that fit meets the limit.
std::optional<std::int64_t> BatchSearch::on_the_line() const {
  if (options_.limit == 0 || below_.peak == 0 || largest_.peak <= below_.peak) return std::nullopt;
  const double bytes_each = static_cast<double>(largest_.peak - below_.peak) /
                            static_cast<double>(largest_.batch - below_.batch);
  const double more = static_cast<double>(options_.limit - largest_.peak) / bytes_each;
  return largest_.batch + static_cast<std::int64_t>(std::min(more, 1e15));
}

std::optional<std::int64_t> BatchSearch::next() const {
  if (trials_ == options_.trials || smallest_not_ == 1) return std::nullopt;
  if (trials_ == 0) return options_.start;
  const std::int64_t multiple = options_.multiple;
  if (largest_.batch == 0) {
    const std::int64_t half = smallest_not_ / 2;
    return half >= multiple ? half / multiple * multiple : half;
  }
  if (smallest_not_ > 0 && smallest_not_ - largest_.batch <= finest()) return std::nullopt;

  std::int64_t most = std::min(largest_.batch * kMostGrowth, kMostBatch);
  std::int64_t wanted = largest_.batch * 2;
  if (smallest_not_ > 0) {
    most = smallest_not_ - 1;
    wanted = largest_.batch + (smallest_not_ - largest_.batch) / 2;
  }
  // One step beyond what should fit tells that nothing more does.
  if (const auto met = on_the_line(); met && (*met <= most || smallest_not_ == 0))
    wanted = std::max(*met, largest_.batch + finest());
  wanted = std::max(std::min(wanted, most) / multiple, largest_.batch / multiple + 1) * multiple;
  if (smallest_not_ > 0 && wanted >= smallest_not_) return std::nullopt;
  if (wanted > kMostBatch) return std::nullopt;
  return wanted;
}

void BatchSearch::tried(std::int64_t batch, bool fits, std::int64_t peak) {
  ++trials_;
  if (options_.limit > 0 && peak > options_.limit) fits = false;
  if (!fits) {
    if (smallest_not_ == 0 || batch < smallest_not_) smallest_not_ = batch;
    return;
  }
  if (batch <= largest_.batch) return;
  below_ = largest_;
  largest_ = {batch, peak};
  // Memory may be more fragmented in one trial than in the next.
  if (smallest_not_ <= batch) smallest_not_ = 0;
}

std::optional<std::int64_t> BatchSearch::largest() const {
  return largest_.batch > 0 ? std::optional(largest_.batch) : std::nullopt;
}

}  // namespace backfold
