// SPDX-License-Identifier: Apache-2.0
//
// Integers in fewer bytes, under a bound that the caller proves.
//
// Every element lies between low and high, both included, or is the sentinel, a value outside that
// range (a loss's ignore_index, for example). The bound must follow from what the integers are:
// class numbers below the number of classes, positions below a length. One that was only observed
// in some data may not hold in other.
//
// Bytes. One unsigned little-endian code per element, in the elements' order:
//
//   code = x - low,   or high - low + 1 for the sentinel.
//
// A code takes 8, 16 or 32 bits, the fewest that hold the largest code: high - low, or one more
// where there is a sentinel. Zero bytes fill the payload up to a multiple of 16.
//
// A code decodes to low + code, modulo 2^(bits of the type); the sentinel's to the sentinel. That
// defines codes that no element has, too.

#ifndef BACKFOLD_NARROW_H_
#define BACKFOLD_NARROW_H_

#include <cstddef>
#include <cstdint>

#include "backfold/execution.h"
#include "backfold/status.h"
#include "backfold/types.h"

namespace backfold {

struct NarrowFormat {
  ElementType type = ElementType::kI64;  // int64, int32 or int16; of the source and of the result
  std::int64_t count = 0;                // elements
  std::int64_t low = 0;                  // least element; the type holds it
  std::int64_t high = 0;                 // greatest element; the type holds it
  bool has_sentinel = false;
  std::int64_t sentinel = 0;  // below low or above high; the type holds it
};

// Says what is wrong with a format: a value that is not allowed, or codes that would not be
// narrower than the elements.
Status validate(const NarrowFormat& format);

// Bytes of the payload: a function of the format alone. 0 for a format that validate() refuses.
std::size_t packed_bytes(const NarrowFormat& format);

// Bytes of one code: 1, 2 or 4. 0 for a format that validate() refuses.
std::size_t code_bytes(const NarrowFormat& format);

// Packs format.count contiguous elements, aligned to their size. Reads the source once and never
// writes it. Builds without NDEBUG check the bound first (and then wait for the stream); in other
// builds an element that breaks it decodes to another value.
Status pack(const NarrowFormat& format, const void* source, Payload payload,
            const Execution& execution);

// Restores format.count elements. Every payload of the right size decodes to something.
Status unpack(const NarrowFormat& format, ConstPayload payload, void* destination,
              const Execution& execution);

}  // namespace backfold

#endif  // BACKFOLD_NARROW_H_
