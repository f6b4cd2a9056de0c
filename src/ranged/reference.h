// SPDX-License-Identifier: Apache-2.0
//
// The ranged quantizer as plain loops: what every other backend must agree with. Spans of elements
// start on multiples of kBitBlock.

#ifndef BACKFOLD_RANGED_REFERENCE_H_
#define BACKFOLD_RANGED_REFERENCE_H_

#include <cstdint>

#include "backfold/ranged.h"
#include "ranged/arithmetic.h"

namespace backfold::core {

// Elements `first` to `first + count - 1` of a tensor, and their codes in `codes`, which are those
// of the whole tensor, as `source` and `destination` are its first element. Returns whether every
// element is finite.
bool reference_pack_ranged(const RangedFormat& format, const void* source, const Grid* grids,
                           MixedKey key, std::int64_t first, std::int64_t count,
                           std::uint8_t* codes);
void reference_unpack_ranged(const RangedFormat& format, const Grid* grids,
                             const std::uint8_t* codes, std::int64_t first, std::int64_t count,
                             void* destination);

// Widens one channel's bounds by `count` neighbouring elements.
void reference_widen_run(ElementType type, const void* source, std::int64_t count, Bounds* bounds);

// Widens the bounds of `count` neighbouring channels by one element each.
void reference_widen_row(ElementType type, const void* source, std::int64_t count, Bounds* bounds);

// Gives the channels that hold an element that is not finite their NaN.
void mark_non_finite(const RangedFormat& format, const void* source, Grid* grids);

// What expected_squared_error() sums over the channels.
double reference_channel_error(const RangedFormat& format, const void* source, std::int64_t channel,
                               const Grid& grid);

}  // namespace backfold::core

#endif  // BACKFOLD_RANGED_REFERENCE_H_
