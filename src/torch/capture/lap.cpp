// SPDX-License-Identifier: Apache-2.0

#include "torch/capture/lap.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

namespace backfold::torch_layer {
namespace {

// None while a graph is captured, or where there are no events that tell the time.
std::optional<c10::Event> event_on(c10::Device device) {
  try {
    c10::Event event(device.type(), c10::EventFlag::BACKEND_DEFAULT);
    event.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
    return event;
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

}  // namespace

Lap::Lap(c10::Device device) : device_(device), began_(Clock::now()) {
  if (!device_.is_cpu()) began_on_device_ = event_on(device_);
}

void Lap::end() {
  if (ended_) return;
  ended_ = Clock::now();
  if (began_on_device_) ended_on_device_ = event_on(device_);
}

std::optional<double> Lap::ms() const {
  if (!ended_) return std::nullopt;
  if (device_.is_cpu()) return std::chrono::duration<double, std::milli>(*ended_ - began_).count();
  if (!ended_on_device_) return std::nullopt;
  try {
    ended_on_device_->synchronize();
    return began_on_device_->elapsedTime(*ended_on_device_);
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

}  // namespace backfold::torch_layer
