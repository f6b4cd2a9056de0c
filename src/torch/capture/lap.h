// SPDX-License-Identifier: Apache-2.0

#ifndef BACKFOLD_TORCH_CAPTURE_LAP_H_
#define BACKFOLD_TORCH_CAPTURE_LAP_H_

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <chrono>
#include <optional>

namespace backfold::torch_layer {

// The time that one call takes: of a thread on a CPU, on the current stream of another device.
class Lap {
 public:
  // Begins now.
  explicit Lap(c10::Device device);
  // Ends now; the first end counts.
  void end();
  // Waits for the device. None before the end, or where the device does not tell.
  std::optional<double> ms() const;

 private:
  using Clock = std::chrono::steady_clock;
  const c10::Device device_;
  Clock::time_point began_;
  std::optional<Clock::time_point> ended_;
  std::optional<c10::Event> began_on_device_, ended_on_device_;
};

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_CAPTURE_LAP_H_
