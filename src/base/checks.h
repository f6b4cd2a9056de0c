// SPDX-License-Identifier: Apache-2.0
//
// Checks of arguments that every codec makes before it touches memory.

#ifndef BACKFOLD_BASE_CHECKS_H_
#define BACKFOLD_BASE_CHECKS_H_

#include <cstddef>
#include <cstdint>

#include "backfold/execution.h"
#include "backfold/status.h"
#include "backfold/types.h"

namespace backfold::core {

// Whether builds look at the data to see that they keep a promised contract.
#ifdef NDEBUG
inline constexpr bool kCheckContracts = false;
#else
inline constexpr bool kCheckContracts = true;
#endif

// `count` is between 0 and kMaxElements.
Status check_count(std::int64_t count);

// `data`, an argument of that name, is aligned to its elements, and not null unless there are none.
Status check_buffer(const char* argument, const void* data, std::int64_t count,
                    std::size_t element_bytes);

// The payload is not null, aligned and holds `needed` bytes.
Status check_payload(ConstPayload payload, std::size_t needed);

// The execution names a backend, at least one thread and, if any, a SIMD target that is there.
Status check_execution(const Execution& execution);

// What a build without CUDA kernels answers to a call for them.
Status no_cuda_kernels();

// `type` is fp32, fp16, bf16 or fp64.
Status check_float_type(ElementType type);

// What every pack and unpack checks before it touches memory: the execution, the tensor's buffer,
// an argument of that name, and the payload.
Status check_call(const Execution& execution, const char* argument, const void* data,
                  std::int64_t count, std::size_t element_bytes, ConstPayload payload,
                  std::size_t needed);

// Bytes rounded up to whole units of payload alignment.
constexpr std::size_t padded(std::size_t bytes) {
  return (bytes + kPayloadAlignment - 1) / kPayloadAlignment * kPayloadAlignment;
}

}  // namespace backfold::core

// Leaves the function with the status of the first check that fails.
#define BACKFOLD_RETURN_IF_ERROR(CALL) \
  if (::backfold::Status failed = (CALL); !failed.ok()) return failed

#endif  // BACKFOLD_BASE_CHECKS_H_
