// SPDX-License-Identifier: Apache-2.0

#include "torch/plan/guard.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <unordered_set>

#include "base/rng.h"
#include "torch/store/treatment.h"

namespace backfold::torch_layer {
namespace {

constexpr std::int64_t kLeastDensePairs = 16;
constexpr std::int64_t kPairInterval = 8;  // steps, once pairs are not dense
constexpr std::int64_t kLeastPairs = 8;    // for an estimate

// Whether the gradient that arrives at a leaf will be added to its .grad. torch.autograd.grad only
// returns it.
bool is_accumulated() {
  const auto* nodes = torch::autograd::get_current_graph_task_exec_info();
  if (!nodes || nodes->empty()) return true;  // a backward over the whole graph
  const auto found = nodes->find(torch::autograd::get_current_node().get());
  return found != nodes->end() && found->second.needed_;
}

class Hook : public torch::autograd::FunctionPreHook {
 public:
  Hook(std::shared_ptr<GradientSketch> sketch, std::int64_t row)
      : sketch_(std::move(sketch)), row_(row) {}

  std::vector<at::Tensor> operator()(const std::vector<at::Tensor>& gradients) override {
    if (sketch_->is_watching() && gradients[0].defined() && is_accumulated())
      sketch_->add(row_, gradients[0]);
    return gradients;
  }

  // A compiled backward runs without this hook. The default implementation raises.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}

  // Whether a hook belongs to a sketch. Its address does not tell: torch drops hooks, and the next
  // one may be allocated in the same place.
  static bool is_of(const FunctionPreHook* hook, const GradientSketch* sketch) {
    const auto* ours = dynamic_cast<const Hook*>(hook);
    return ours && ours->sketch_.get() == sketch;
  }

 private:
  const std::shared_ptr<GradientSketch> sketch_;
  const std::int64_t row_;
};

bool can_be_watched(const at::Tensor& parameter) {
  return parameter.defined() && parameter.requires_grad() && parameter.is_leaf() &&
         !obstacle_in(parameter) && at::isFloatingType(parameter.scalar_type()) &&
         parameter.numel() > 0;
}

std::uint64_t combined(std::uint64_t hash, std::uint64_t next) {
  return core::mix64(core::mix64(hash + 0x9e37'79b9'7f4a'7c15u) ^ next);
}

// Not std::shuffle, whose order differs between standard libraries.
void shuffle(std::vector<at::Tensor>& tensors, std::uint64_t seed) {
  for (std::size_t left = tensors.size(); left > 1; --left)
    std::swap(tensors[left - 1], tensors[combined(seed, left) % left]);
}

using DeviceTensors = std::pair<at::Device, std::vector<at::Tensor>>;

std::vector<DeviceTensors> by_device(const std::vector<at::Tensor>& parameters) {
  std::vector<DeviceTensors> devices;
  std::unordered_set<c10::TensorImpl*> known;
  for (const at::Tensor& parameter : parameters) {
    if (!can_be_watched(parameter)) continue;
    if (!known.insert(parameter.unsafeGetTensorImpl()).second) continue;
    auto device = std::find_if(devices.begin(), devices.end(), [&](const DeviceTensors& other) {
      return other.first == parameter.device();
    });
    if (device == devices.end())
      device = devices.insert(device, {parameter.device(), std::vector<at::Tensor>()});
    device->second.push_back(parameter);
  }
  return devices;
}

}  // namespace

Guard::Guard(const std::vector<at::Tensor>& parameters, std::uint64_t seed)
    : dense_pairs_(kLeastDensePairs) {
  std::uint64_t fingerprint = seed;
  for (auto& [device, tensors] : by_device(parameters)) {
    shuffle(tensors, seed);
    std::vector<GradientSketch::Row> rows;
    for (const at::Tensor& tensor : tensors) {
      rows.push_back(GradientSketch::row_of(tensor));
      fingerprint = combined(fingerprint, tensor.dim());
      for (const std::int64_t size : tensor.sizes()) fingerprint = combined(fingerprint, size);
    }
    const auto sketch = std::make_shared<GradientSketch>(device, std::move(rows), seed);
    dense_pairs_ = std::max(dense_pairs_, sketch->groups());
    sketches_.push_back(sketch);
    for (std::size_t row = 0; row < tensors.size(); ++row) {
      watched_.push_back({tensors[row], sketch, static_cast<std::int64_t>(row)});
      hang_hook(watched_.back());
    }
  }
  fingerprint_ = static_cast<std::int64_t>(fingerprint);
}

Guard::~Guard() {
  for (const auto& [parameter, sketch, row] : watched_)
    std::erase_if(torch::autograd::impl::hooks(parameter),
                  [&](const auto& hook) { return Hook::is_of(hook.get(), sketch.get()); });
}

// register_hook() would drop existing hooks, Python's included, if the tensor has none of its kind
// yet. Registering one from Python drops ours the same way, so it is checked for in every turn.
void Guard::hang_hook(const Watched& watched) {
  auto& hooks = torch::autograd::impl::hooks(watched.parameter);
  for (const auto& hook : hooks)
    if (Hook::is_of(hook.get(), watched.sketch.get())) return;
  hooks.push_back(std::make_unique<Hook>(watched.sketch, watched.row));
}

void Guard::begin_step() {
  finish_step();
  ++steps_;
  if (phase_ < 0 && steps_ >= next_pair_) start_pair();
  for (const auto& sketch : sketches_) sketch->watch(phase_);
}

void Guard::finish_step() {
  bool arrived = false;
  for (const auto& sketch : sketches_) arrived |= sketch->take_arrived();
  if (!arrived || ++phase_ < 2) return;
  for (const auto& sketch : sketches_) sketch->finish_pair(steps_);
  ++pairs_;
  phase_ = -1;
}

void Guard::start_pair() {
  phase_ = 0;
  next_pair_ = pairs_ + 1 < dense_pairs_ ? steps_ : steps_ + kPairInterval;
  for (const auto& sketch : sketches_) sketch->start_pair(pairs_);
  for (const Watched& watched : watched_)
    if (watched.sketch->has_turn(watched.row)) hang_hook(watched);
}

void Guard::pause(bool on) {
  for (const auto& sketch : sketches_) sketch->pause(on);
}

std::optional<GradientMoments> Guard::moments() const {
  if (pairs_ < kLeastPairs) return std::nullopt;
  SketchTotals totals;
  for (const auto& sketch : sketches_) sketch->add_to(totals);
  if (totals.seen == 0 || 2 * totals.seen < totals.watchable) return std::nullopt;
  const double scale = totals.watchable / totals.seen;
  return GradientMoments{scale * totals.moments.variance, scale * totals.moments.energy};
}

SketchState Guard::state() const {
  SketchState state;
  state.counters = {fingerprint_, steps_, pairs_, next_pair_, phase_};
  for (const auto& sketch : sketches_) sketch->append_to(state);
  return state;
}

void Guard::load(const SketchState& state) {
  const SketchState mine = this->state();
  TORCH_CHECK_VALUE(state.counters.size() == mine.counters.size() &&
                        state.values.size() == mine.values.size() &&
                        state.counters[0] == fingerprint_,
                    "state must come from a guard of the same parameters and seed, got one with ",
                    state.counters.size(), " counters and ", state.values.size(), " values");
  const std::int64_t* counter = state.counters.data() + 1;
  const double* value = state.values.data();
  const std::int64_t steps = *counter++, pairs = *counter++, next_pair = *counter++;
  const std::int64_t phase = *counter++;
  TORCH_CHECK_VALUE(steps >= 0 && pairs >= 0 && next_pair >= 0 && phase >= -1 && phase <= 1,
                    "state must have been written by a guard, got ", steps, " steps, ", pairs,
                    " pairs, the next at step ", next_pair, ", and phase ", phase);
  steps_ = steps;
  pairs_ = pairs;
  next_pair_ = next_pair;
  phase_ = static_cast<int>(phase);
  for (const auto& sketch : sketches_) {
    sketch->load(pairs_, counter, value);
    sketch->watch(phase_);
  }
}

}  // namespace backfold::torch_layer
