// SPDX-License-Identifier: Apache-2.0
//
// Group quantizer: a few bits per element, unbiased.
//
// Groups. A tensor is cut into groups of G = 128 or 256 elements. `flat` and `rotated` cut it in
// memory order; `strided` reads it as rows x columns and runs each group down one column: group t *
// columns + c holds rows t * G to t * G + G - 1 of column c. The last group along the cut may be
// shorter; it takes the room of a whole one, and its missing codes are 0.
//
// Bytes. All headers come first, one 32-bit little-endian word per group, padded with zero bytes to
// a multiple of 16; then the codes, G * bits / 8 bytes per group.
//
// Codes of one group. Widths 1, 2, 4, 8, 16 are one plane; 3 is a plane of the low 2 bits followed
// by one of the high bit, 5 is 4 + 1, 6 is 4 + 2. In a plane of w bits the code of element i stands
// at bit
//
//   w * position(i),   position(i) = 4 * (i mod G/4) + i div G/4,
//
// counted from the least significant bit of the first byte. (So four elements a quarter of the
// group apart are neighbours: a SIMD register or a GPU lane that reads consecutive elements
// assembles whole bytes without moving anything across lanes.)
//
// Header, an ordinary group:
//
//   bits 31..16   step, as a bf16 number: its sign bit is 0 and its exponent is not 255
//   bits 15..0    m, a signed integer
//
//   value(code) = m * unit + code * step,   unit = 2^(E - 7),   2^E <= steps * step < 2^(E + 1)
//
// where steps = 2^bits - 1 is the largest code. Step and m are rounded outward, so the group's
// range lies inside and no value is clipped. m counts in 1/128 to 1/256 of the range, so a group
// far from zero keeps a tight step: the variance grows by less than 5% for |minimum| up to 128
// times the range.
//
// Header, the other groups (bit 31 is "far or special"):
//
//   bit 31 set, exponent not 255  kind = bits 1..0, m = bits 15..2 (signed). kind 0: a finite
//                                 group further than 128 ranges from zero, unit = 2^(E - 2). Else
//                                 the group holds non-finite elements: the code 2^bits - 1 means
//                                 +inf (kind 1), -inf (2) or NaN (3; also for a mix), the largest
//                                 finite code is one less, steps with it, and unit = 2^(E - 5)
//   bit 31 set, exponent 255      only 1 bit: code 1 is non-finite of kind bits 22..21, code 0 the
//                                 mean of the finite elements, whose upper 21 fp32 bits are bits
//                                 20..0
//   bit 31 clear, exponent 255    bit 18 clear: every element is the fp64 number in the first 8
//                                 bytes of the codes. Bit 18 set: an element was beyond 2^126,
//                                 kind = bits 17..16 as above, value(code) = FLT_MAX * (2 * code /
//                                 steps - 1)
//
// Zero-exact. Code 0 means 0.0 and code c > 0 means value(c - 1), raised to the smallest positive
// number (2^-126; 2^-24 for fp16) if it is less; steps is one less than above, and the group's
// range is that of its positive elements. FLT_MAX * code / steps replaces the last formula above.
// So decoded > 0 exactly where the source is > 0.
//
// Rotated. An ordinary header announces the codes of y = H D x. D flips the signs of elements i
// whose bit (i mod 32) div 2 + 16 * (i mod 2) is set in word i div 32 of 0x9d3f81c6, 0x2e5bd497,
// 0x71a83fe2, 0xc40db65b. H is the 128-point Hadamard matrix in its natural order, unnormalised,
// computed in fp32 by butterflies of stride 1, 2, 4, ..., 64. The elements are x = D H (y / 128),
// scaled first so that no sum overflows. Any other header announces the elements themselves.
//
// Rounding is stochastic. Codes are drawn so that the expected decoded fp32 value is the source, up
// to fp32 rounding of the group's range; a destination of 16 bits then rounds to nearest. A finite
// source never decodes to an infinity: results are clamped to the largest finite number of their
// type. fp64 sources are rounded to fp32 first, ranges below 2^-110 are widened to it.

#ifndef BACKFOLD_GROUP_H_
#define BACKFOLD_GROUP_H_

#include <cstddef>
#include <cstdint>

#include "backfold/execution.h"
#include "backfold/status.h"
#include "backfold/types.h"
#include "backfold/widths.h"

namespace backfold {

enum class Layout : std::uint8_t { kFlat, kStrided, kRotated };

struct GroupFormat {
  ElementType type = ElementType::kF32;  // fp32, fp16, bf16 or fp64; of source and result
  int bits = 4;                          // one of kCodeWidths
  Layout layout = Layout::kFlat;
  int group = 128;          // 256 only for kFlat, and slower on a GPU
  bool zero_exact = false;  // for tensors that are never negative; 2 bits or more; not for kRotated
  std::int64_t count = 0;   // elements
  std::int64_t columns = 0;  // for kStrided: elements of one row; divides count
};

// Says what is wrong with a format: an unsupported value or combination, a width whose packets are
// not smaller than their source. (Tensors of less than a group may still come out larger: compare
// packed_bytes() with the source.)
Status validate(const GroupFormat& format);

// Bytes of the payload: a function of the format alone. 0 for a format that validate() refuses.
std::size_t packed_bytes(const GroupFormat& format);

// Packs format.count contiguous elements, aligned to their size. Reads the source once and never
// writes it. Builds without NDEBUG check that a zero-exact source is not negative.
Status pack(const GroupFormat& format, const void* source, const Key& key, Payload payload,
            const Execution& execution);

// Restores format.count elements. Every payload of the right size decodes to something; none makes
// it read or write out of bounds.
Status unpack(const GroupFormat& format, ConstPayload payload, void* destination,
              const Execution& execution);

// Values of a tensor brought to one scale on the way into a packet, and back on the way out. With
// r = i / run mod rows for element i in memory order,
//
//   packed:    y = (x - shift[r]) * scale[r]
//   unpacked:  x = y * (1 / scale[r]) + shift[r]
//
// in fp32, each operation rounded. The payload is that of y, an fp32 tensor. So groups that span
// rows of different size (the input of a norm) lend no row the rounding errors of another.
struct RowAffine {
  const float* shift = nullptr;  // of each row, memory of the backend; null: 0
  const float* scale = nullptr;
  std::int64_t run = 0;   // consecutive elements of one row
  std::int64_t rows = 0;  // after which they begin again
};

// pack() and unpack() of y. For fp32, fp16 and bf16, flat or strided groups of 128, not zero-exact.
Status validate(const GroupFormat& format, const RowAffine& rows);
Status pack(const GroupFormat& format, const RowAffine& rows, const void* source, const Key& key,
            Payload payload, const Execution& execution);
Status unpack(const GroupFormat& format, const RowAffine& rows, ConstPayload payload,
              void* destination, const Execution& execution);

// Sum over the elements of the expected squared error that packing adds: step^2 * p * (1 - p) for
// an element p steps above the code below it. Exact up to rounding, given the data; host memory
// only.
Status expected_squared_error(const GroupFormat& format, const void* source, double* error);

}  // namespace backfold

#endif  // BACKFOLD_GROUP_H_
