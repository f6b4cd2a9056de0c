// SPDX-License-Identifier: Apache-2.0
//
// A two-valued mask {0, v} as bits and one value: dropout's {0, 1.1111}, for example.
//
// Bytes. A prefix of 16 bytes: v in the element's own type, little-endian, in the first 2, 4 or 8
// bytes, then zero bytes. Then one bit per element: element i is bit i mod 8, counted from the
// least significant, of byte 16 + i div 8. Zero bits fill the payload up to a multiple of 16 bytes.
//
// A bit of 1 means v, a bit of 0 means +0. v is +0 where no element is anything else, so an empty
// mask is 16 zero bytes. Elements are told apart by their bits: v may be infinite, subnormal or a
// NaN, and comes back as it was; -0 is neither 0 nor a v.

#ifndef BACKFOLD_MASK_H_
#define BACKFOLD_MASK_H_

#include <cstddef>
#include <cstdint>

#include "backfold/execution.h"
#include "backfold/status.h"
#include "backfold/types.h"

namespace backfold {

struct MaskFormat {
  ElementType type =
      ElementType::kF32;   // fp32, fp16, bf16 or fp64; of the source and of the result
  std::int64_t count = 0;  // elements
};

// Says what is wrong with a format: a type or count that is not allowed.
Status validate(const MaskFormat& format);

// Bytes of the payload: a function of the format alone. 0 for a format that validate() refuses.
std::size_t packed_bytes(const MaskFormat& format);

// Looks at format.count elements in host memory: whether every one is +0 or has the bits of one
// value that is not -0, and that value. It is 0 where there is none, and where there are several.
Status find_mask_value(const MaskFormat& format, const void* source, bool* two_valued,
                       double* value);

// Packs format.count contiguous elements, aligned to their size, that the caller knows to be
// two-valued. Reads the source once and never writes it; on a GPU, v is found on the way, without
// waiting for it. Builds without NDEBUG check the data first (and then wait for the stream). Where
// other builds are given more values than two, elements other than +0 decode to any one of them.
Status pack(const MaskFormat& format, const void* source, Payload payload,
            const Execution& execution);

// Restores format.count elements. Every payload of the right size decodes to something.
Status unpack(const MaskFormat& format, ConstPayload payload, void* destination,
              const Execution& execution);

}  // namespace backfold

#endif  // BACKFOLD_MASK_H_
