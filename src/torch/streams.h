// SPDX-License-Identifier: Apache-2.0
//
// Memory that one stream wrote and another reads, without CUDA's headers.

#ifndef BACKFOLD_TORCH_STREAMS_H_
#define BACKFOLD_TORCH_STREAMS_H_

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <optional>

namespace backfold::torch_layer {

// The current stream of a device that has streams.
std::optional<c10::Stream> current_stream(const c10::Device& device);

// Raises while the stream captures a CUDA graph: at every replay, packets would be rounded with the
// same random numbers, and copies would be of memory that is another tensor's by then.
void refuse_capture(const c10::Stream& stream);

// Lets the stream `now` read what was written on another, and the memory wait for it.
void hand_over(const c10::DataPtr& memory, const c10::Stream& written_on, const c10::Stream& now);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_STREAMS_H_
