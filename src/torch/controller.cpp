// SPDX-License-Identifier: Apache-2.0

#include "backfold/controller.h"

#include <torch/nn/module.h>

#include "torch/entry.h"

namespace backfold {
namespace {

using torch_layer::Entry;
using torch_layer::State;

std::shared_ptr<State> state_for(const ControllerOptions& options) {
  if (options.bits) {
    GroupFormat format;
    format.bits = *options.bits;
    format.type = ElementType::kF64;
    TORCH_CHECK_VALUE(validate(format).ok(),
                      "bits must be None or one of 1, 2, 3, 4, 5, 6, 8, 16, got ", *options.bits);
  }
  TORCH_CHECK_VALUE(options.min_bytes >= 0, "min_bytes must be 0 or more, got ", options.min_bytes);
  auto state = std::make_shared<State>();
  state->options.bits = options.bits;
  state->options.min_bytes = options.min_bytes;
  state->options.seed = options.seed;
  state->keep = options.keep;
  return state;
}

}  // namespace

Controller::Scope::Scope(std::unique_ptr<Entry> entry) : entry_(std::move(entry)) {}
Controller::Scope::Scope(Scope&&) noexcept = default;
Controller::Scope::~Scope() = default;

Controller::Controller(ControllerOptions options) : state_(state_for(options)) {}

Controller::Controller(const torch::nn::Module& model, ControllerOptions options)
    : Controller(std::move(options)) {
  for (const auto& tensors : {model.named_parameters(), model.named_buffers()})
    for (const auto& tensor : tensors)
      state_->parameters.push_back({tensor.value(), state_->sites->landmark(tensor.key(), 0)});
  if (!state_->parameters.empty()) state_->device = state_->parameters.front().tensor.device();
}

Controller::~Controller() = default;

Controller::Scope Controller::enter() {
  if (state_->entered.exchange(true)) {
    TORCH_CHECK(state_->thread == std::this_thread::get_id(),
                "this controller is entered on another thread: give each thread its own");
    TORCH_CHECK(false, "this controller is entered already: its block cannot be inside itself");
  }
  try {
    return Scope(std::make_unique<Entry>(state_));
  } catch (...) {
    state_->entered = false;
    throw;
  }
}

std::int64_t Controller::steps() const { return state_->steps; }
Report Controller::report() const { return torch_layer::report_of(*state_); }

}  // namespace backfold
