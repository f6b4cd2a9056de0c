// SPDX-License-Identifier: Apache-2.0

#include "torch/replays.h"

#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include "torch/capture/undisturbed.h"
#include "torch/state.h"
#include "torch/streams.h"

namespace backfold::torch_layer {
namespace {

// Far enough that the blocks of no two replays in a row overlap.
constexpr std::uint32_t kStride = 0x9e37'79b1u;

void check_capturable(const State& state) {
  const Planning& planning = state.planning;
  TORCH_CHECK(state.turn.defined() && state.turn.device() == *state.blocks.device,
              "backfold: a CUDA graph cannot be captured in the first block on ",
              *state.blocks.device, ": run a few steps outside of the capture first");
  const bool timed = planning.products == Planning::Products::kUnwanted ||
                     planning.products == Planning::Products::kPlanned;
  TORCH_CHECK((!planning.target || planning.plan) && timed,
              "backfold: a CUDA graph cannot be captured before the first plan is made, after ",
              state.blocks.steps,
              " steps: run a few more outside of the capture first, or call calibrate()");
  TORCH_CHECK(!offloads(state),
              "backfold: offloading cannot be captured in a CUDA graph: at a replay, what is "
              "copied to the host would be another tensor's memory");
}

}  // namespace

bool is_captured(const State& state) {
  if (!state.blocks.device) return false;
  const auto stream = current_stream(*state.blocks.device);
  return stream && is_captured(*stream);
}

const std::uint32_t* next_turn(State& state) {
  const std::optional<at::Device>& device = state.blocks.device;
  if (!device || !device->is_cuda() || state.probing.owns_blocks()) return nullptr;
  const Undisturbed undisturbed;
  const c10::DeviceGuard guard(*device);
  if (!is_captured(state)) {
    if (!state.turn.defined() || state.turn.device() != *device)
      state.turn = at::zeros({1}, at::TensorOptions(at::kInt).device(*device));
    return nullptr;
  }
  check_capturable(state);
  state.turn.add_(static_cast<std::int32_t>(kStride));
  return reinterpret_cast<const std::uint32_t*>(state.turn.const_data_ptr<std::int32_t>());
}

}  // namespace backfold::torch_layer
