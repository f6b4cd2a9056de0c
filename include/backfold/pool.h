// SPDX-License-Identifier: Apache-2.0
//
// Pooled activations: the average of each block of positions and, if asked, a few bits of residual
// per element.
//
// With bits = 0 the averages alone are kept: BIASED, an element decodes to the mean of its block.
// With bits > 0 it is unbiased, see the end of this comment.
//
// Blocks. A tensor is read as outer x depth x height x width x inner. Sizes of 1 among depth,
// height and width are dropped, and the others moved to the right: below, width is the last that
// is left, and height and depth are 1 where there is nothing. A block holds `block` positions along
// each of the three, fewer at their ends, of one channel (one of `inner`). Blocks are counted in
// the order outer, depth, height, width, inner. A block row is the blocks of one (outer, depth,
// height), there are C = ceil(width / block) * inner in one; a strip is the elements of a block in
// one row of the tensor: up to L = min(block, width) elements, `inner` apart in memory.
//
// Bytes. One bf16 average per block, in their order. If bits > 0: one 32-bit header per band, in
// order, and then the codes. Each of the three parts is padded with zero bytes to a multiple of 16.
//
// Bands. R = min(block, depth) * min(block, height) is the number of strips of a block. S = 256 if
// L <= 4, else 128. If C * R <= S, a band is G = max(1, S / 2 / (C * R)) whole block rows (fewer at
// the end of the tensor), and K = C; else it is K = S / R neighbouring blocks of one block row, and
// G = 1. (So a thread block's warp holds a band in its registers, and reads memory once.)
//
// Codes. The elements of a band are ordered by block row, depth, height, block, and along the
// strip. Element i has its code at bit i * bits, counted from the least significant of a band's
// first byte. Band t starts at the 32-bit word
//
//   ceil(before * bits / 32) + t
//
// of the codes, where `before` is the number of elements in the bands before it, and what it does
// not use of the words up to the next band is zero.
//
// Header, as in group.h for an ordinary and for a far group:
//
//   bit 31 clear, exponent not 255   bits 31..16: step, bf16; bits 15..0: m, signed;
//                                    base = m * 2^(E - 7), 2^E <= steps * step < 2^(E + 1)
//   bit 31 set, exponent not 255     the same with m = bits 15..2, base = m * 2^(E - 2); bits 1..0
//                                    are 0
//   bit 31 clear, exponent 255,      an element was beyond 2^124: averages do not count, and
//   bit 18 set                       value(code) = FLT_MAX * (2 * code / steps - 1)
//   any other                        an element was not finite: the whole band decodes to NaN
//
//   steps = 2^bits - 1,   value(code) = (average + base) + code * step
//
// with the parenthesis rounded to fp32, and product and sum fused. Step and base are those of the
// band's residuals, element less average, rounded outward: no value is clipped.
//
// Averages. Elements become fp32 (fp64 to nearest). A strip is padded with zeros to P = 4, 8 or 16
// elements, the least that holds L; x[j] + x[j + P/2] for j < P/2, and so on with halves of that,
// leaves its sum, which is multiplied by 2^-9. (If it is not finite: the same over the elements
// times 2^-9.) These are added in the order of depth and height, rows that the block lacks as
// zeros; times 512 / (elements of the block), rounded to bf16 (what is finite stays finite), it is
// the average. Where it is not finite it is NaN, and the block decodes to NaN.
//
// Random numbers (rng.h): the strip of block row g, row r of R and block k of its band is number s
// = (g * R + r) * K + k. Its element j takes block (t * G * R * K + s) * ceil(P / 8) + j / 8, and
// multiplier j mod 8. With scale = (1 / step) * (1 / steps), the share of x in the range of its
// band, x * scale - (average + base) * scale clamped to [0, 1], is multiplied by steps * (1 -
// 2^-22): what it has before the point and the random number decide the code, as in group.h.
//
// With bits > 0 the expected decoded fp32 value is the source, up to fp32 rounding; a destination
// of 16 bits then rounds to nearest. A finite source never decodes to an infinity.

#ifndef BACKFOLD_POOL_H_
#define BACKFOLD_POOL_H_

#include <cstddef>
#include <cstdint>

#include "backfold/execution.h"
#include "backfold/status.h"
#include "backfold/types.h"

namespace backfold {

struct PoolFormat {
  ElementType type = ElementType::kF32;  // fp32, fp16, bf16 or fp64; of source and result
  int block = 8;  // positions along a side: 2 to 16, to 8 where all three dimensions are pooled
  int bits = 0;   // of the residual: 1, 2, 3, 4 or 8; 0 keeps the averages alone (biased)
  std::int64_t outer = 0;  // samples times channels, or samples for channels-last
  std::int64_t depth = 1;  // pooled, as are height and width, unless it is 1
  std::int64_t height = 1;
  std::int64_t width = 1;
  std::int64_t inner = 1;  // channels that lie together at one position, else 1
};

// Elements of the tensor.
constexpr std::int64_t count(const PoolFormat& format) {
  return format.outer * format.depth * format.height * format.width * format.inner;
}

// Says what is wrong with a format: a value that is not allowed, nothing to pool, or packets that
// are not smaller than their source.
Status validate(const PoolFormat& format);

// Bytes of the payload: a function of the format alone. 0 for a format that validate() refuses.
std::size_t packed_bytes(const PoolFormat& format);

// Packs count(format) contiguous elements, aligned to their size. Reads the source once and never
// writes it. The key matters only with bits > 0.
Status pack(const PoolFormat& format, const void* source, const Key& key, Payload payload,
            const Execution& execution);

// Restores count(format) elements. Every payload of the right size decodes to something; none makes
// it read or write out of bounds.
Status unpack(const PoolFormat& format, ConstPayload payload, void* destination,
              const Execution& execution);

// Sum over the elements of the squared error that packing adds; host memory only. With bits > 0 its
// expectation, step^2 * p * (1 - p) for an element p steps above the code below it; with bits = 0
// exactly what pooling loses, (element - decoded)^2. What decodes to NaN does not count.
Status expected_squared_error(const PoolFormat& format, const void* source, double* error);

}  // namespace backfold

#endif  // BACKFOLD_POOL_H_
