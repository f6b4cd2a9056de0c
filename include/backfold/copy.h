// SPDX-License-Identifier: Apache-2.0
//
// Plain copy: the codec of what must stay as it is and cannot be made smaller.
//
// Bytes. Those of the source, in order, and no more.

#ifndef BACKFOLD_COPY_H_
#define BACKFOLD_COPY_H_

#include <cstddef>
#include <cstdint>

#include "backfold/execution.h"
#include "backfold/status.h"
#include "backfold/types.h"

namespace backfold {

struct CopyFormat {
  std::int64_t bytes = 0;  // 0 to 8 * kMaxElements
};

// Says what is wrong with a format: a number of bytes that is not allowed.
Status validate(const CopyFormat& format);

// Bytes of the payload. 0 for a format that validate() refuses.
std::size_t packed_bytes(const CopyFormat& format);

// Copies format.bytes bytes, at any alignment, to a payload that does not overlap them. A host
// target makes no difference: the C library's copy serves all.
Status pack(const CopyFormat& format, const void* source, Payload payload,
            const Execution& execution);

// Copies them back.
Status unpack(const CopyFormat& format, ConstPayload payload, void* destination,
              const Execution& execution);

}  // namespace backfold

#endif  // BACKFOLD_COPY_H_
