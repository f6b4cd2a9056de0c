// SPDX-License-Identifier: Apache-2.0
//
// Random signs: a number, or the same negated, by a bit of a hash of key and place.
//
// What a random projection multiplies by. It is not stored: the key makes it again.
//
//   mix(x)  = x3 xor x3 >> 31,  x3 = (x2 xor x2 >> 27) * 0x94d049bb133111eb,
//                               x2 = (x  xor x  >> 30) * 0xbf58476d1ce4e5b9
//   start   = mix(mix(seed + 0x9e3779b97f4a7c15) xor stream)
//   word(w) = mix(start + w * 0x9e3779b97f4a7c15)
//
// modulo 2^64. Element i is -size if bit i mod 64 of word(i div 64) is set, counted from the least
// significant, and size if not. `size` is rounded to the type first, to nearest, ties to even;
// what is too large for fp16 or bf16 becomes the largest finite number.
//
// Over many keys each sign is even, and products of two, three or four different ones average to
// zero, as they must for a projection to be unbiased with the error that its formula says.

#ifndef BACKFOLD_SIGNS_H_
#define BACKFOLD_SIGNS_H_

#include <cstdint>

#include "backfold/execution.h"
#include "backfold/status.h"
#include "backfold/types.h"

namespace backfold {

// Writes `count` elements of fp32, fp16, bf16 or fp64, aligned to their size, for a finite size. A
// host target makes no difference: one loop serves all. The same key gives the same bytes on every
// backend.
Status fill_signs(ElementType type, float size, std::int64_t count, const Key& key,
                  void* destination, const Execution& execution);

}  // namespace backfold

#endif  // BACKFOLD_SIGNS_H_
