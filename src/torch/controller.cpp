// SPDX-License-Identifier: Apache-2.0

#include "backfold/controller.h"

#include <torch/nn/module.h>

#include <algorithm>

#include "torch/calibrate.h"
#include "torch/capture/entry.h"

namespace backfold {
namespace {

using torch_layer::Entry;
using torch_layer::kWidths;
using torch_layer::State;
using torch_layer::Target;

std::shared_ptr<State> state_for(const ControllerOptions& options) {
  TORCH_CHECK_VALUE(!options.ratio || !options.budget, "ratio and budget cannot be given together");
  TORCH_CHECK_VALUE(!options.ratio || *options.ratio > 1, "ratio must be above 1, got ",
                    *options.ratio);
  TORCH_CHECK_VALUE(!options.budget || *options.budget > 0, "budget must be above 0 bytes, got ",
                    *options.budget);
  TORCH_CHECK_VALUE(!options.bits || (*options.bits >= 1 && *options.bits <= 16),
                    "bits must be None or from 1 to 16, got ", *options.bits);
  const bool exists =
      options.bits && std::find(kWidths.begin(), kWidths.end(), *options.bits) != kWidths.end();
  TORCH_CHECK_VALUE(options.adaptive || !options.bits || exists,
                    "bits must be one of 1, 2, 3, 4, 5, 6, 8, 16 where it is not adaptive, got ",
                    *options.bits);
  TORCH_CHECK_VALUE(options.min_bytes >= 0, "min_bytes must be 0 or more, got ", options.min_bytes);
  auto state = std::make_shared<State>();
  if (!options.adaptive) {
    if (options.bits) state->options.bits = static_cast<int>(*options.bits);
  } else if (options.budget) {
    state->planning.target = Target{Target::Kind::kBudget, static_cast<double>(*options.budget)};
  } else if (options.ratio) {
    state->planning.target = Target{Target::Kind::kRatio, *options.ratio};
  } else if (options.bits) {
    state->planning.target = Target{Target::Kind::kBits, *options.bits};
  }
  state->options.adaptive = state->planning.target.has_value();
  state->options.min_bytes = options.min_bytes;
  state->options.seed = options.seed;
  state->model.keep = options.keep;
  for (const CodecRule& rule : options.codec) state->policy.add(rule, false);
  for (const Codec& codec : options.menu) state->policy.offer(codec);
  return state;
}

}  // namespace

Controller::Scope::Scope(std::unique_ptr<Entry> entry) : entry_(std::move(entry)) {}
Controller::Scope::Scope(Scope&&) noexcept = default;
Controller::Scope::~Scope() = default;

Controller::Controller(ControllerOptions options) : state_(state_for(options)) {}

Controller::Controller(const torch::nn::Module& model, ControllerOptions options)
    : Controller(std::move(options)) {
  for (const bool buffers : {false, true})
    for (const auto& tensor : buffers ? model.named_buffers() : model.named_parameters())
      state_->model.parameters.push_back(
          {tensor.value(), state_->sites->landmark(tensor.key(), 0), buffers});
  torch_layer::watch_gradients(*state_);
  if (!state_->model.parameters.empty())
    state_->blocks.device = state_->model.parameters.front().tensor.device();
}

Controller::~Controller() = default;

void Controller::sample_ids(const at::Tensor& ids, std::int64_t count) {
  TORCH_CHECK_TYPE(ids.defined() && ids.scalar_type() == at::kLong && ids.dim() == 1,
                   "ids must be an int64 tensor of one dimension, got ", ids.toString(), " of ",
                   ids.defined() ? ids.dim() : 0);
  TORCH_CHECK_VALUE(count >= 1, "count must be an int of 1 or more, got ", count);
  if (!ids.is_cuda() && ids.numel() != 0) {  // on a GPU looking would wait for it
    const auto low = ids.min().item<std::int64_t>(), high = ids.max().item<std::int64_t>();
    TORCH_CHECK_VALUE(low >= 0 && high < count, "ids must be from 0 to ", count - 1, ", got ", low,
                      " to ", high);
  }
  state_->options.samples = {ids, count};
}

Controller::Scope Controller::enter() {
  if (state_->blocks.entered.exchange(true)) torch_layer::refuse_entered(*state_);
  try {
    return Scope(std::make_unique<Entry>(state_));
  } catch (...) {
    state_->blocks.entered = false;
    throw;
  }
}

void Controller::calibrate(const std::function<void()>& step) {
  TORCH_CHECK(state_->planning.target, "calibrate needs an adaptive controller");
  torch_layer::calibrate(state_, step, {});
  torch_layer::replan(*state_);
}

std::int64_t Controller::steps() const { return state_->blocks.steps; }
Report Controller::report() const { return torch_layer::report_of(*state_); }

}  // namespace backfold
