// SPDX-License-Identifier: Apache-2.0

#include "torch/streams.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "backfold/execution.h"

namespace backfold::torch_layer {

bool is_captured(const c10::Stream& stream) {
  Execution execution;
  execution.backend = Backend::kCuda;
  execution.stream = stream.native_handle();
  return backfold::is_captured(execution);
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
