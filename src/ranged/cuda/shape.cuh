// SPDX-License-Identifier: Apache-2.0
//
// Which channel an element is in, and how kernels share a tensor of channels out.
//
// Two ways. In tiles, a warp works on neighbouring vectors; inside one channel a tile needs one
// range, and elsewhere each element looks its own up. With a period, a thread works on vectors that
// are a multiple of whole rows apart: they are in the same channels, whose ranges stay in
// registers. The latter serves short runs, inner = 1 above all.

#ifndef BACKFOLD_RANGED_CUDA_SHAPE_CUH_
#define BACKFOLD_RANGED_CUDA_SHAPE_CUH_

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "backfold/ranged.h"
#include "base/host_device.h"

namespace backfold::cuda {

struct Shape {
  explicit Shape(const RangedFormat& format)
      : count(format.outer * format.channels * format.inner),
        channels(format.channels),
        inner(format.channels == 1 ? count : format.inner),
        inverse_channels(1.0 / static_cast<double>(channels)),
        inverse_inner(1.0 / static_cast<double>(inner)) {}

  std::int64_t count;
  std::int64_t channels;
  std::int64_t inner;
  double inverse_channels;
  double inverse_inner;
};

struct Position {
  std::int64_t channel;
  std::int64_t left;  // elements of the run of one channel, from here on
};

// n / d for n up to 2^48: the product is off by less than 1. A 64-bit division takes about 100
// instructions.
__device__ inline std::int64_t quotient(std::int64_t n, std::int64_t d, double inverse) {
  const std::int64_t guess = __double2ll_rz(__dmul_rn(__ll2double_rn(n), inverse));
  const std::int64_t rest = n - guess * d;
  return rest < 0 ? guess - 1 : rest >= d ? guess + 1 : guess;
}

__device__ inline Position position_of(const Shape& shape, std::int64_t i) {
  const std::int64_t run = quotient(i, shape.inner, shape.inverse_inner);
  const std::int64_t row = quotient(run, shape.channels, shape.inverse_channels);
  return {run - row * shape.channels, shape.inner - (i - run * shape.inner)};
}

// Calls visit(j, channel) for kCount elements from `first` on.
template <int kCount, typename Visit>
__device__ inline void walk(const Shape& shape, std::int64_t first, Visit visit) {
  Position at = position_of(shape, first);
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    visit(j, at.channel);
    if (--at.left > 0) continue;
    at.left = shape.inner;
    if (++at.channel == shape.channels) at.channel = 0;
  }
}

// Vectors between those of one thread: a multiple of whole rows and of a warp, for at most
// `threads` threads (where rows are short enough) of at least `least` vectors (where there are so
// many). 0 where tiles serve better: long runs, rows that are no whole number of vectors, one row.
inline std::int64_t period_of(const Shape& shape, int per_vector, int tile, std::int64_t threads,
                              std::int64_t least) {
  const std::int64_t row = shape.channels * shape.inner;
  const bool one_channel = shape.channels == 1;
  if (!one_channel && (shape.inner >= 8 * tile || row % per_vector != 0)) return 0;
  const std::int64_t whole = one_channel ? 32 : std::lcm(row / per_vector, std::int64_t{32});
  const std::int64_t times = shape.count / per_vector / whole;
  if (times < 2) return 0;
  return whole * std::max(std::min(threads / whole, times / least), std::int64_t{1});
}

}  // namespace backfold::cuda

#endif  // BACKFOLD_RANGED_CUDA_SHAPE_CUH_
