// SPDX-License-Identifier: Apache-2.0

#include "torch/streams.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

namespace backfold::torch_layer {
namespace {

template <typename Device>
void refuse_capture_on(const Device& device, const c10::Stream& stream) {
  if constexpr (requires { device.isStreamCapturing(stream); }) {  // torch 2.12 and later
    TORCH_CHECK(!device.isStreamCapturing(stream),
                "backfold: nothing can be folded while a CUDA graph is captured");
  }
}

}  // namespace

void refuse_capture(const c10::Stream& stream) {
  refuse_capture_on(c10::impl::VirtualGuardImpl(stream.device_type()), stream);
}

std::optional<c10::Stream> current_stream(const c10::Device& device) {
  if (!device.is_cuda()) return std::nullopt;
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

void hand_over(const c10::DataPtr& memory, const c10::Stream& written_on, const c10::Stream& now) {
  // Whatever that stream has been given by now includes the kernel that wrote.
  c10::Event written(now.device_type());
  written.record(written_on);
  written.block(now);
  c10::impl::VirtualGuardImpl(now.device_type()).recordDataPtrOnStream(memory, now);
}

}  // namespace backfold::torch_layer
