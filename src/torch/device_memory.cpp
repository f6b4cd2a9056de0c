// SPDX-License-Identifier: Apache-2.0

#include "torch/device_memory.h"

#include <c10/core/CachingDeviceAllocator.h>

namespace backfold::torch_layer {

std::optional<DeviceMemory> device_memory(const std::optional<c10::Device>& device) {
  if (!device || !device->is_cuda()) return std::nullopt;
  constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const auto stats = c10::getDeviceAllocator(device->type())->getDeviceStats(device->index());
  return DeviceMemory{stats.allocated_bytes[kAll].current, stats.allocated_bytes[kAll].peak};
}

bool reset_device_peak(const std::optional<c10::Device>& device) {
  if (!device || !device->is_cuda()) return false;
  c10::getDeviceAllocator(device->type())->resetPeakStats(device->index());
  return true;
}

}  // namespace backfold::torch_layer
