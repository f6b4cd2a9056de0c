// SPDX-License-Identifier: Apache-2.0
//
// A predicate as bits: one bit per element that says whether a comparison holds for it.
//
// For backward passes that read only such an answer: ReLU's (x > 0, where a NaN passes), hardtanh's
// (an open range), clamp's (a closed one). Also how bool tensors become bits.
//
// Bytes. Element i is bit i mod 8, counted from the least significant, of byte i div 8. Zero bits
// fill the payload up to a multiple of 16 bytes.
//
// The bit of an element x that is not NaN is 1 where
//
//   kNonZero        x != 0 (-0 is zero)         kGreater        x > low
//   kInsideOpen     low < x and x < high        kGreaterEqual   x >= low
//   kInsideClosed   low <= x and x <= high      kLess           x < low
//                                               kLessEqual      x <= low
//
// and the bit of a NaN is `nan`. fp32, fp16 and bf16 elements are compared as fp32 numbers, with
// low and high rounded to fp32, to nearest; fp64 elements are compared as fp64. Subnormal numbers
// are numbers, whatever the flush mode. A range whose low is above its high holds for nothing.
//
// An element unpacks to if_true or if_false, rounded to fp32 and from there to the element's type,
// to nearest even each time (fp64: as given); a bool to 1 or 0.

#ifndef BACKFOLD_PREDICATE_H_
#define BACKFOLD_PREDICATE_H_

#include <cstddef>
#include <cstdint>

#include "backfold/execution.h"
#include "backfold/status.h"
#include "backfold/types.h"

namespace backfold {

enum class Comparison : std::uint8_t {
  kNonZero,
  kGreater,
  kGreaterEqual,
  kLess,
  kLessEqual,
  kInsideOpen,
  kInsideClosed,
};

struct PredicateFormat {
  ElementType type = ElementType::kF32;  // fp32, fp16, bf16, fp64 or bool; of source and result
  std::int64_t count = 0;                // elements
  Comparison comparison = Comparison::kNonZero;  // bool: only kNonZero
  double low = 0.0;                              // not NaN where the comparison reads it
  double high = 0.0;                             // likewise; read by the two ranges
  bool nan = false;                              // the bit of a NaN
  double if_true = 1.0;                          // what a 1 unpacks to
  double if_false = 0.0;                         // what a 0 unpacks to
};

// Says what is wrong with a format: a type, comparison, bound or count that is not allowed.
Status validate(const PredicateFormat& format);

// Bytes of the payload: a function of the format alone. 0 for a format that validate() refuses.
std::size_t packed_bytes(const PredicateFormat& format);

// Packs format.count contiguous elements, aligned to their size. Reads the source once and never
// writes it; writes every byte of the payload.
Status pack(const PredicateFormat& format, const void* source, Payload payload,
            const Execution& execution);

// Writes if_true or if_false for each of format.count elements. Every payload of the right size
// decodes to something.
Status unpack(const PredicateFormat& format, ConstPayload payload, void* destination,
              const Execution& execution);

}  // namespace backfold

#endif  // BACKFOLD_PREDICATE_H_
