// SPDX-License-Identifier: Apache-2.0

#include "torch/offload/link.h"

#include <ATen/Functions.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <unordered_map>

#include "torch/capture/undisturbed.h"
#include "torch/codec/codec.h"
#include "torch/offload/backing.h"
#include "torch/streams.h"

namespace backfold::torch_layer {
namespace {

constexpr std::int64_t kBytes = 4 << 20;

// Of copies that go on beside a GPU's work, about this part is felt in the step: it waits where it
// has less to compute than to copy. A CPU's worker takes turns with what it computes.
double felt(const at::Device& device) { return device.is_cpu() ? 1 : 0.1; }

void wait_for(const std::shared_ptr<Transfer>& transfer) {
  transfer->wait();
  TORCH_CHECK(transfer->failure().empty(), transfer->failure());
}

std::optional<Link> measured(const at::Device& device) {
  using Clock = std::chrono::steady_clock;
  const Undisturbed undisturbed;
  const at::DisableRecordFunctionGuard unwatched;
  try {
    const std::unique_ptr<Backing> backing = backing_for(device);
    const auto room = backing ? backing->arena().reserve(kBytes) : std::nullopt;
    if (!room) return std::nullopt;
    const at::Tensor bytes = at::zeros({kBytes}, at::TensorOptions(at::kByte).device(device));
    double least = 0;
    for (int i = 0; i < 3; ++i) {  // the first one also waits for memory to be there
      const auto begin = Clock::now();
      wait_for(backing->write(bytes, current_stream(device), *room));
      wait_for(backing->read(*room, bytes));
      const double ms = std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
      least = i == 0 ? ms : std::min(least, ms);
    }
    backing->arena().release(*room);
    return Link{backing->name(), felt(device) * least / kBytes};
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

}  // namespace

std::optional<Link> link_of(const at::Device& device) {
  static std::mutex& mutex = *new std::mutex;
  static auto& known = *new std::unordered_map<at::Device, std::optional<Link>>;
  const std::lock_guard lock(mutex);
  const auto found = known.find(device);
  return found != known.end() ? found->second : (known[device] = measured(device));
}

}  // namespace backfold::torch_layer
