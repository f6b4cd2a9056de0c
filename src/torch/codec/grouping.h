// SPDX-License-Identifier: Apache-2.0
//
// How the group quantizer is applied to the tensors of one site: a width, and where groups run.
//
// Where groups run decides more than their size. A choice is made for a site, whose tensors may
// differ in size from step to step, so strided groups are described by dimensions, not by numbers:
// a row is made of the `inner` innermost dimensions in memory. Of (batch, tokens, heads, channels)
// inner = 1 makes groups of one channel number, inner = 2 of one channel of one head.

#ifndef BACKFOLD_TORCH_CODEC_GROUPING_H_
#define BACKFOLD_TORCH_CODEC_GROUPING_H_

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <string>

#include "backfold/group.h"
#include "backfold/widths.h"
#include "torch/codec/codec.h"

namespace backfold::torch_layer {

struct Grouping {
  Layout layout = Layout::kFlat;
  int inner = 0;  // dimensions of a row; for kStrided

  bool operator==(const Grouping&) const = default;
};

struct Choice {
  int bits = 4;  // or kRawBits
  Grouping grouping;
  int codec = -1;  // of the menu, where the plan chose one; bits are for tensors it does not fit

  bool operator==(const Choice&) const = default;
};

// Stands for a tensor that a plan keeps as it is.
inline constexpr int kRawBits = 64;

bool is_width(double bits);  // one of kCodeWidths

// The widest that is no wider than `bits`; the narrowest where all are.
int widest_within(double bits);

// All groupings that may be chosen, flat first.
inline constexpr std::array<Grouping, 4> kGroupings = {
    Grouping{Layout::kFlat, 0}, Grouping{Layout::kRotated, 0}, Grouping{Layout::kStrided, 1},
    Grouping{Layout::kStrided, 2}};

// "flat", "rotated", "strided 1", "strided 2", and back.
std::string name_of(const Grouping& grouping);
std::optional<Grouping> grouping_named(const std::string& name);

// Groups of the quantizer that a tensor takes, for each of kGroupings; 0 where that grouping would
// waste more than a twentieth on groups that are not full, or is not possible.
std::array<std::int64_t, kGroupings.size()> groups_of(const at::Tensor& tensor);

// Bytes of packets with so many groups together, at most.
std::int64_t bytes_of_groups(int bits, std::int64_t groups, std::int64_t packets);

// The format for a tensor; flat where the grouping is not for tensors of this shape.
GroupFormat group_format(const at::Tensor& tensor, ElementType type, const Choice& choice,
                         bool zero_exact);

// What a tensor would come back as: packed as the store packs it, and unpacked.
at::Tensor round_trip(const at::Tensor& tensor, Format format, const Key& key);
// The same for the input of a norm, where `by` is given.
at::Tensor round_trip(const at::Tensor& tensor, GroupFormat format, const Key& key,
                      const std::optional<Normalisation>& by);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_CODEC_GROUPING_H_
