// SPDX-License-Identifier: Apache-2.0

#include "backfold/controller.h"

#include <torch/nn/module.h>

#include <istream>
#include <iterator>
#include <ostream>

#include "torch/calibrate.h"
#include "torch/capture/entry.h"
#include "torch/exact_together.h"
#include "torch/json/state.h"
#include "torch/listing.h"
#include "torch/options.h"
#include "torch/step.h"

namespace backfold {
namespace {

using torch_layer::Entry;
using torch_layer::State;

std::string text_of(std::istream& stream, const char* what) {
  std::string text(std::istreambuf_iterator<char>(stream), {});
  TORCH_CHECK_VALUE(!stream.bad() && !text.empty(), what, ": nothing could be read");
  return text;
}

void write(std::ostream& stream, const std::string& text) {
  stream << text << '\n';
  TORCH_CHECK(stream, "the stream took no more than a part of what was written");
}

}  // namespace

Controller::Scope::Scope(std::shared_ptr<State> state, std::unique_ptr<Entry> entry)
    : state_(std::move(state)), entry_(std::move(entry)) {}
Controller::Scope::Scope(Scope&&) noexcept = default;
Controller::Scope::~Scope() {
  entry_.reset();
  if (!state_) return;
  torch_layer::end_block(*state_);
  const std::string missed = torch_layer::missed_checkpoints(*state_);
  if (!missed.empty()) TORCH_WARN(missed);
}

Controller::Controller(ControllerOptions options) : state_(torch_layer::state_for(options)) {}

Controller::Controller(const torch::nn::Module& model, ControllerOptions options)
    : Controller(std::move(options)) {
  std::vector<torch_layer::ListedTensor> tensors;
  for (const bool buffers : {false, true})
    for (const auto& tensor : buffers ? model.named_buffers() : model.named_parameters())
      tensors.push_back({tensor.key(), tensor.value(), buffers});
  torch_layer::list_model(*state_, {}, tensors);
  if (!tensors.empty()) state_->blocks.device = tensors.front().tensor.device();
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
    torch_layer::plan_exactly_together(*state_);
    return Scope(state_, std::make_unique<Entry>(state_));
  } catch (...) {
    state_->blocks.entered = false;
    throw;
  }
}

at::Tensor Controller::step(const std::function<at::Tensor()>& forward) {
  TORCH_CHECK_VALUE(forward, "forward must be a function that returns the loss");
  // What cannot be cut is run again whole.
  return torch_layer::run_step(
      *this, [&](double) { return forward(); }, 1);
}

at::Tensor Controller::step(const std::function<at::Tensor(double)>& forward) {
  TORCH_CHECK_VALUE(forward, "forward must be a function that returns the loss");
  return torch_layer::run_step(*this, forward, fraction_now(state_->turns));
}

void Controller::calibrate(const std::function<void()>& step) {
  TORCH_CHECK(state_->planning.target, "calibrate needs an adaptive controller, without a plan");
  torch_layer::forget_turn(*state_);
  torch_layer::measure_and_plan(*state_, [&] { return torch_layer::calibrate(state_, step, {}); });
}

std::int64_t Controller::steps() const { return state_->blocks.steps; }
Report Controller::report() const { return torch_layer::report_of(*state_); }

void Controller::save(std::ostream& stream) {
  if (torch_layer::settle_turn(*state_, {})) torch_layer::finish_turn(*state_, {});
  write(stream, torch_layer::state_as_json(*state_));
}

void Controller::load(std::istream& stream) {
  torch_layer::take_state(*state_, text_of(stream, "state"));
}

void Controller::save_plan(std::ostream& stream) const {
  write(stream, torch_layer::plan_as_json(*state_));
}

void Controller::load_plan(std::istream& stream) {
  torch_layer::take_plan(*state_, text_of(stream, "plan"));
}

}  // namespace backfold
