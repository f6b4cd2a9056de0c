// SPDX-License-Identifier: Apache-2.0
//
// Logarithms of shares that add up to 1, as log-softmax makes them.
//
// Noise in the logarithms leaves shares that add up to something else. A row x of them becomes
//
//   x[i] - log(exp(x[0]) + exp(x[1]) + ...)
//
// in fp32, rounded to the type to nearest. A row whose sum is not a positive finite number stays as
// it is: a class that cannot be may have come back as no number, and the others must not follow it.
//
// The sum is within 1e-5 of the exact one, relative, on every backend, and differs between backends
// within that.

#ifndef BACKFOLD_SHARES_H_
#define BACKFOLD_SHARES_H_

#include <cstdint>

#include "backfold/execution.h"
#include "backfold/status.h"
#include "backfold/types.h"

namespace backfold {

// Replaces `rows` rows of `length` elements each, one after the other in memory, of fp32, fp16 or
// bf16. A host target makes no difference: one loop serves all.
Status restore_sums(ElementType type, std::int64_t rows, std::int64_t length, void* logarithms,
                    const Execution& execution);

}  // namespace backfold

#endif  // BACKFOLD_SHARES_H_
