// SPDX-License-Identifier: Apache-2.0

#ifndef BACKFOLD_TORCH_BANDWIDTH_H_
#define BACKFOLD_TORCH_BANDWIDTH_H_

#include <c10/core/Device.h>

#include <optional>

namespace backfold::torch_layer {

// Bytes read plus bytes written per second by a copy on the device, with torch's threads on a CPU.
// Measured at the first call for a device in the process, which takes some milliseconds and waits
// for the device. None where there is no memory for it.
std::optional<double> copy_bandwidth(at::Device device);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_BANDWIDTH_H_
