// SPDX-License-Identifier: Apache-2.0
//
// The door of shares, and the loop over rows in host memory.

#include "backfold/shares.h"

#include <cmath>

#include "base/checks.h"
#include "base/convert.h"
#include "base/dispatch.h"
#include "base/threads.h"
#include "shares/cuda/shares.h"

namespace backfold {
namespace {

// Elements from which on another thread is worth it.
constexpr std::int64_t kGrain = 1 << 14;

template <typename T>
void restore_row(T* row, std::int64_t length) {
  double sum = 0;
  for (std::int64_t i = 0; i < length; ++i) sum += std::exp(core::to_float(row[i]));
  if (!(sum > 0) || !std::isfinite(sum)) return;
  const auto excess = static_cast<float>(std::log(sum));
  for (std::int64_t i = 0; i < length; ++i)
    row[i] = core::from_float<T>(core::to_float(row[i]) - excess);
}

Status check_rows(ElementType type, std::int64_t rows, std::int64_t length) {
  if (type != ElementType::kF32 && type != ElementType::kF16 && type != ElementType::kBF16)
    return Status::error(StatusCode::kInvalidArgument, "type must be fp32, fp16 or bf16, got %s",
                         name_of(type));
  BACKFOLD_RETURN_IF_ERROR(core::check_count(rows));
  BACKFOLD_RETURN_IF_ERROR(core::check_count(length));
  if (length > 0 && rows > kMaxElements / length)
    return Status::error(StatusCode::kInvalidArgument,
                         "rows times length must be at most %lld, got %lld times %lld",
                         static_cast<long long>(kMaxElements), static_cast<long long>(rows),
                         static_cast<long long>(length));
  return {};
}

}  // namespace

Status restore_sums(ElementType type, std::int64_t rows, std::int64_t length, void* logarithms,
                    const Execution& execution) {
  BACKFOLD_RETURN_IF_ERROR(check_rows(type, rows, length));
  BACKFOLD_RETURN_IF_ERROR(core::check_execution(execution));
  BACKFOLD_RETURN_IF_ERROR(
      core::check_buffer("logarithms", logarithms, rows * length, size_of(type)));
  if (core::choose_cuda(execution))
    return cuda::restore_sums(type, rows, length, logarithms, execution.stream);
  core::report_target(execution, 0);
  if (length == 0) return {};
  core::with_element(type, [&]<typename T>() {
    T* const all = static_cast<T*>(logarithms);
    core::split_over_threads(rows, kGrain / length + 1, execution,
                             [&](std::int64_t begin, std::int64_t end) {
                               for (std::int64_t row = begin; row < end; ++row)
                                 restore_row(all + row * length, length);
                             });
  });
  return {};
}

}  // namespace backfold
