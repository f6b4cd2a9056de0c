// SPDX-License-Identifier: Apache-2.0

#include "torch/bandwidth.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <map>
#include <mutex>

namespace backfold::torch_layer {
namespace {

// More than caches hold.
constexpr std::int64_t kBytes = std::int64_t{64} << 20;
constexpr int kRuns = 8;  // of which the best is taken

double measured(at::Device device) {
  const at::NoGradGuard no_grad;
  const at::DisableRecordFunctionGuard unwatched;
  const auto options = at::TensorOptions().dtype(at::kByte).device(device);
  const at::Tensor source = at::zeros({kBytes}, options);
  at::Tensor copy = at::zeros({kBytes}, options);
  const auto wait = [&] {
    if (!device.is_cpu())
      c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
  };
  const int copies = device.is_cpu() ? 1 : 16;  // in a run: a GPU is slow to begin
  double best = std::numeric_limits<double>::infinity();
  for (int run = 0; run < kRuns; ++run) {
    wait();
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < copies; ++i) copy.copy_(source);
    wait();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    best = std::min(best, seconds.count());
  }
  return 2.0 * copies * static_cast<double>(kBytes) / best;
}

}  // namespace

std::optional<double> copy_bandwidth(at::Device device) {
  static std::mutex mutex;
  static std::map<std::pair<c10::DeviceType, c10::DeviceIndex>, double> known;
  const std::lock_guard lock(mutex);
  const std::pair key(device.type(), device.index());
  if (const auto found = known.find(key); found != known.end()) return found->second;
  try {
    return known[key] = measured(device);
  } catch (const c10::Error&) {
    known.erase(key);
    return std::nullopt;
  }
}

}  // namespace backfold::torch_layer
