// SPDX-License-Identifier: Apache-2.0
//
// How the group quantizer is applied to the tensors of one site: a width, and the direction in
// which groups run.
//
// The direction of groups matters more than their size. A choice holds for a site, whose tensors
// may differ in size from step to step, so strided groups are described by dimensions, not by
// numbers: a row is made of the `inner` innermost dimensions in memory. In (batch, tokens, heads,
// channels), inner = 1 makes groups of one channel index, inner = 2 of one channel of one head.

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
  int inner = 0;  // dimensions of a row, for kStrided

  bool operator==(const Grouping&) const = default;
};

struct Choice {
  int bits = 4;  // or kRawBits
  Grouping grouping;
  int codec = -1;  // of the menu, if the plan chose one; tensors that it does not fit use `bits`

  bool operator==(const Choice&) const = default;
};

// The width of a tensor that a plan keeps unfolded.
inline constexpr int kRawBits = 64;

bool is_width(double bits);  // one of kCodeWidths

// The widest width up to `bits`, or the narrowest one if all are wider.
int widest_within(double bits);

// All groupings to choose from, flat first.
inline constexpr std::array<Grouping, 4> kGroupings = {
    Grouping{Layout::kFlat, 0}, Grouping{Layout::kRotated, 0}, Grouping{Layout::kStrided, 1},
    Grouping{Layout::kStrided, 2}};

// "flat", "rotated", "strided 1", "strided 2", and back.
std::string name_of(const Grouping& grouping);
std::optional<Grouping> grouping_named(const std::string& name);

// Time to pack and unpack in a layout / the time for flat groups. A constant of the kind of device:
// plans must not depend on what else a machine was doing when they were made.
double relative_time(Layout layout, c10::DeviceType device);

// The number of groups that a tensor takes, for each of kGroupings; 0 for a grouping that is not
// possible or would waste more than a twentieth on groups that are not full.
std::array<std::int64_t, kGroupings.size()> groups_of(const at::Tensor& tensor);

// The most bytes that `packets` packets take that hold `groups` groups in all.
std::int64_t bytes_of_groups(int bits, std::int64_t groups, std::int64_t packets);

// The format for a tensor; flat if the grouping does not fit its shape.
GroupFormat group_format(const at::Tensor& tensor, ElementType type, const Choice& choice,
                         bool zero_exact);

// A tensor packed as the store packs it, and unpacked again.
at::Tensor round_trip(const at::Tensor& tensor, Format format, const Key& key);
// The same for the input of a norm, if `by` is given.
at::Tensor round_trip(const at::Tensor& tensor, GroupFormat format, const Key& key,
                      const std::optional<Normalisation>& by);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_CODEC_GROUPING_H_
