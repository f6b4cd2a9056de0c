// SPDX-License-Identifier: Apache-2.0
//
// Host memory of packets and of what is decoded from them, kept for the next step.
//
// A large block that malloc gives back to the system comes as fresh pages the next time, and
// touching those takes several times as long as unpacking does. Steps repeat, so what one of them
// gave back the next one takes. With what is in use it is never more than half as much again as the
// last five steps had in use at once. What four steps in a row did not need goes back to the
// system, and everything does when the last user is gone, or when somebody finds that it is idle.

#ifndef BACKFOLD_TORCH_CODEC_REUSED_MEMORY_H_
#define BACKFOLD_TORCH_CODEC_REUSED_MEMORY_H_

#include <c10/core/Allocator.h>

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace backfold::torch_layer {

// Blocks below this size are malloc's business.
inline constexpr std::size_t kReusedFrom = 1 << 18;

// For tensors on a CPU. Without a user it is torch's own allocator.
c10::Allocator& reused_memory();

// Bytes that are kept for later.
std::size_t bytes_kept_for_reuse();

// A step begins.
void age_reused_memory();

// Gives all of it back if none was taken or returned for so long. For programs that go on without
// steps, as in evaluation.
void give_back_idle_memory(std::chrono::milliseconds idle);

// Memory is kept for as long as somebody uses it.
class ReusedMemoryUser {
 public:
  ReusedMemoryUser();
  ~ReusedMemoryUser();
  ReusedMemoryUser(const ReusedMemoryUser&) = delete;
  ReusedMemoryUser& operator=(const ReusedMemoryUser&) = delete;
};

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_CODEC_REUSED_MEMORY_H_
