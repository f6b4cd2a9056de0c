// SPDX-License-Identifier: Apache-2.0
//
// Values scaled by row (RowAffine), on their way into and out of the group quantizer's kernels.

#ifndef BACKFOLD_GROUP_CUDA_ROWS_CUH_
#define BACKFOLD_GROUP_CUDA_ROWS_CUH_

#include <cstdint>

#include "base/cuda/divider.h"
#include "base/cuda/elements.cuh"
#include "group/row_affine.h"

namespace backfold::cuda {

// A RowAffine as kernels want it. All null for a tensor without.
struct RowTask {
  const float* shift;
  const float* scale;
  Divider by_run, by_rows;
  std::int64_t run, rows;
  bool wide;  // elements are not all below 2^31: divisions are long
};

// `count` is one more than the last element that is asked for.
inline RowTask row_task(const RowAffine& rows, std::int64_t count) {
  constexpr std::int64_t kLimit = std::int64_t{1} << 31;
  RowTask task{};
  task.shift = rows.shift;
  task.scale = rows.scale;
  task.run = rows.run;
  task.rows = rows.rows;
  task.wide = count >= kLimit || rows.run >= kLimit || rows.rows >= kLimit;
  if (!task.wide) {
    task.by_run = Divider(rows.run);
    task.by_rows = Divider(rows.rows);
  }
  return task;
}

// The row of an element, and how many of its run are left, itself included.
struct RowAt {
  std::int64_t row;
  std::int64_t left;
};
__device__ inline RowAt row_at(const RowTask& task, std::int64_t element) {
  if (task.wide) {
    const std::int64_t run = element / task.run;
    return {run % task.rows, (run + 1) * task.run - element};
  }
  const auto number = static_cast<unsigned>(element);
  const unsigned run = task.by_run.quotient(number);
  return {task.by_rows.remainder(run), (run + 1) * static_cast<unsigned>(task.run) - number};
}

struct Affine {
  float shift, scale;
};
__device__ inline Affine affine_in(const RowTask& task, std::int64_t row) {
  return {task.shift != nullptr ? __ldg(task.shift + row) : 0.0f, __ldg(task.scale + row)};
}
// Out of line: for runs shorter than a vector, and elements off the fast path.
__device__ __noinline__ inline Affine affine_at(const RowTask& task, std::int64_t element) {
  return affine_in(task, row_at(task, element).row);
}

// Calls change(j, affine) for each of `kCount` neighbouring elements, number `element` the first.
// `prepare` is applied to each affine once.
template <int kCount, typename Prepare, typename Change>
__device__ inline void for_vector(const RowTask& task, std::int64_t element, Prepare prepare,
                                  Change change) {
  if (task.run < kCount) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) change(j, prepare(affine_at(task, element + j)));
    return;
  }
  // A vector lies in two rows at most.
  const RowAt at = row_at(task, element);
  const Affine own = prepare(affine_in(task, at.row));
  if (at.left >= kCount) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) change(j, own);
    return;
  }
  const Affine next = prepare(affine_in(task, at.row + 1 == task.rows ? 0 : at.row + 1));
#pragma unroll
  for (int j = 0; j < kCount; ++j) change(j, j < at.left ? own : next);
}

template <int kCount>
__device__ inline void scale_values(const RowTask& task, std::int64_t element, float (&x)[kCount]) {
  for_vector<kCount>(
      task, element, [](Affine by) { return by; },
      [&](int j, Affine by) { x[j] = core::scaled(x[j], by.shift, by.scale); });
}

template <int kCount>
__device__ inline void restore_values(const RowTask& task, std::int64_t element,
                                      float (&y)[kCount]) {
  for_vector<kCount>(
      task, element,
      [](Affine by) {
        return Affine{by.shift, __frcp_rn(by.scale)};
      },
      [&](int j, Affine by) { y[j] = core::restored(y[j], by.shift, by.scale); });
}

// Restored values as a vector of elements. Statistics may have been no numbers: what
// from_floats() does not know is converted one by one.
template <typename T>
__device__ inline uint4 from_restored(const float (&x)[kVector<T>]) {
  if constexpr (sizeof(T) == 2) {
    bool ordinary = true;
#pragma unroll
    for (int j = 0; j < kVector<T>; ++j) ordinary = ordinary && fabsf(x[j]) <= 3e38f;
    if (!ordinary) {
      uint4 raw;
      T* elements = reinterpret_cast<T*>(&raw);
#pragma unroll
      for (int j = 0; j < kVector<T>; ++j) elements[j] = core::from_float<T>(x[j]);
      return raw;
    }
  }
  return from_floats<T>(x);
}

}  // namespace backfold::cuda

#endif  // BACKFOLD_GROUP_CUDA_ROWS_CUH_
