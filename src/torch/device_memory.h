// SPDX-License-Identifier: Apache-2.0

#ifndef BACKFOLD_TORCH_DEVICE_MEMORY_H_
#define BACKFOLD_TORCH_DEVICE_MEMORY_H_

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>

namespace backfold::torch_layer {

// Bytes that torch has allocated on a device: now, and at most since the program last reset that.
struct DeviceMemory {
  std::int64_t now = 0, peak = 0;
};

// None on a CPU, which does not count.
std::optional<DeviceMemory> device_memory(const std::optional<c10::Device>& device);

// Begins the peak anew, as the program can. False on a CPU.
bool reset_device_peak(const std::optional<c10::Device>& device);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_DEVICE_MEMORY_H_
