// SPDX-License-Identifier: Apache-2.0
//
// Quantizer over ranges that the caller gives, one for each channel: running estimates that follow
// a tensor from step to step, for example.
//
// A tensor is outer x channels x inner, contiguous. One range for all of it is channels = 1; the
// last dimension of a channels-last tensor is inner = 1.
//
// Bytes. A header of two little-endian fp32 numbers per channel, low and step; zero bytes up to a
// multiple of 16. Then the codes in the elements' order: that of element i stands at bit i * bits,
// counted from the least significant bit of the first byte after the header. Zero bits up to a
// multiple of 16 bytes.
//
//   value(code) = low + code * step,   step = (high - low) / (2^bits - 1)
//
// with one rounding to fp32 (fused), then one to the type: to nearest, and not to an infinity.
//
// Rounding is stochastic: the expected value of an element inside its channel's range is the
// element, up to fp32 rounding of the range. Elements outside are clamped to it, which is biased:
// widen() the range first. fp64 elements are rounded to fp32, those beyond fp32 to its largest
// number.
//
// Ranges. low == high: step is 0 and every element decodes to low. Ranges between 0 and 2^-110
// are taken as 2^-110 wide, bounds beyond +-2^126 as +-2^126. Bounds that are not finite, or low >
// high: low is stored as 0 and step as NaN.
//
// Elements that are not finite. Their channel's step is stored as NaN, whatever its range.
//
// A channel decodes to NaN as a whole unless |low| + (2^bits - 1) * |step| <= 7/4 * 2^127 in fp32,
// a product and a sum. So does one whose step is NaN: where plain training would have shown a NaN
// or an infinity in a few elements, this shows NaN in all of the channel.

#ifndef BACKFOLD_RANGED_H_
#define BACKFOLD_RANGED_H_

#include <cstddef>
#include <cstdint>

#include "backfold/execution.h"
#include "backfold/status.h"
#include "backfold/types.h"

namespace backfold {

struct RangedFormat {
  ElementType type = ElementType::kF32;  // fp32, fp16, bf16 or fp64; of source and result
  int bits = 8;                          // 2, 4 or 8
  std::int64_t outer = 0;                // the tensor is outer x channels x inner
  std::int64_t channels = 0;
  std::int64_t inner = 0;
};

// Says what is wrong with a format: a value that is not allowed. (Every width is narrower than
// every type, but 8 bytes of header per channel may make a small tensor larger: compare
// packed_bytes() with the source.)
Status validate(const RangedFormat& format);

// Bytes of the payload: a function of the format alone. 0 for a format that validate() refuses.
std::size_t packed_bytes(const RangedFormat& format);

// Packs outer * channels * inner contiguous elements, aligned to their size. `ranges` is channels x
// {low, high} in the memory of the backend. Reads the source once, in host memory once more where
// it holds elements that are not finite, and never writes it.
Status pack(const RangedFormat& format, const void* source, const float* ranges, const Key& key,
            Payload payload, const Execution& execution);

// Restores the elements. Every payload of the right size decodes to something; none makes it read
// or write out of bounds.
Status unpack(const RangedFormat& format, ConstPayload payload, void* destination,
              const Execution& execution);

// Sum over the elements of the expected squared error that packing adds: step^2 * p * (1 - p) for
// an element p steps above the code below it, the squared distance to the range for one outside.
// Channels that decode to NaN add nothing. Exact up to rounding, given the data; host memory only.
Status expected_squared_error(const RangedFormat& format, const void* source, const float* ranges,
                              double* error);

// Writes channels x {min(low, least element), max(high, largest element)} to `widened`, in the
// memory of the backend; it may be `ranges` itself. Elements that are not finite do not count, nor
// do bounds that are NaN: {inf, -inf} is the empty range, and stays it where there is no finite
// element. -0 is below +0. Reads the source once.
Status widen(const RangedFormat& format, const void* source, const float* ranges, float* widened,
             const Execution& execution);

}  // namespace backfold

#endif  // BACKFOLD_RANGED_H_
