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

// Whether what is enqueued on a stream goes into a CUDA graph.
bool is_captured(const c10::Stream& stream);

// Lets the stream `now` read what was written on another, and the memory wait for it.
void hand_over(const c10::DataPtr& memory, const c10::Stream& written_on, const c10::Stream& now);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_STREAMS_H_
