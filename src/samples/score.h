// SPDX-License-Identifier: Apache-2.0
//
// Scores of samples and their order, once, for every backend. samples.h says what they mean; the
// order of the sums is part of the format.

#ifndef BACKFOLD_SAMPLES_SCORE_H_
#define BACKFOLD_SAMPLES_SCORE_H_

#include <cfloat>
#include <cstdint>

#include "base/host_device.h"

namespace backfold::core {

inline constexpr int kSampleGroup = 128;

// Groups whose squares are summed as one tree, and lanes that add the sums of the trees.
inline constexpr int kScoreLanes = 32;

// The term of a group whose extremes are these; one of them is NaN, or infinite, if an element is.
// Ranges below 2^-60 count nothing: no term, and no sum, is subnormal, so that machines set to
// flush such numbers to zero agree.
BACKFOLD_HD float squared_range(float low, float high) {
  const float range = high - low;
  if (!(range <= FLT_MAX)) return float_of(0x7f80'0000u);
  return range < 0x1p-60f ? 0.0f : range * range;
}

// What slots rise with, as a number without sign. Below 2^32 - 1, so that one may be added.
BACKFOLD_HD std::uint32_t rank_key(float score, float weight) {
  const double product = static_cast<double>(weight) * static_cast<double>(score);
  const double magnitude = product < 0.0 ? -product : product;
  if (!(magnitude <= FLT_MAX)) return 0xffff'fffeu;
  if (magnitude < 0x1p-126) return 0x8000'0000u;
  const std::uint32_t bits = bits_of(static_cast<float>(product));
  return (bits >> 31) != 0 ? ~bits : bits | 0x8000'0000u;
}

// Adds 32 terms as a balanced tree, neighbours first; overwrites them. A warp whose lanes hold the
// terms does the same by exchanging sums at distances 1, 2, 4, 8, 16.
inline float tree_sum(float* terms) {
  for (int left = kScoreLanes / 2; left > 0; left /= 2)
    for (int i = 0; i < left; ++i) terms[i] = terms[2 * i] + terms[2 * i + 1];
  return terms[0];
}

// A score on the host, from the terms of the sample's groups in their order.
class Score {
 public:
  void add(float term) {
    terms_[filled_] = term;
    if (++filled_ == kScoreLanes) close_tree();
  }

  float total() {
    if (filled_ != 0) close_tree();
    return tree_sum(lanes_);
  }

 private:
  void close_tree() {
    while (filled_ < kScoreLanes) terms_[filled_++] = 0.0f;
    lanes_[lane_] += tree_sum(terms_);
    lane_ = (lane_ + 1) % kScoreLanes;
    filled_ = 0;
  }

  float terms_[kScoreLanes];
  float lanes_[kScoreLanes] = {};
  int filled_ = 0;
  int lane_ = 0;
};

}  // namespace backfold::core

#endif  // BACKFOLD_SAMPLES_SCORE_H_
