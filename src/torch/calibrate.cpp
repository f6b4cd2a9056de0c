// SPDX-License-Identifier: Apache-2.0

#include "torch/calibrate.h"

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <numeric>
#include <unordered_set>

#include "torch/plan/plan.h"
#include "torch/probe/originals.h"
#include "torch/probe/probe.h"

namespace backfold::torch_layer {
namespace {

// Moves leaves by epsilon times a random direction during its lifetime: a leaf whose errors count
// more is moved further. It writes through aliases
// that do not share the leaves' version counters, so autograd does not notice.
class MovedLeaves {
 public:
  MovedLeaves(const std::vector<at::Tensor>& leaves, const LeafWeights& weights, double epsilon,
              std::uint64_t seed) {
    const at::AutoGradMode no_grad(false);
    std::unordered_map<std::string, at::Generator> generators;
    std::unordered_set<const void*> storages;
    std::vector<at::Tensor> directions;
    for (const at::Tensor& leaf : leaves) {
      // If leaves share memory, only the first one moves it.
      if (!storages.insert(leaf.storage().unsafeGetStorageImpl()).second) continue;
      at::Generator& generator = generators[leaf.device().str()];
      if (!generator.defined()) {
        generator = at::globalContext().defaultGenerator(leaf.device()).clone();
        generator.set_current_seed(seed);
      }
      at::Tensor alias = leaf.variable_data();
      aliases_.push_back(alias);
      directions.push_back(at::empty_like(alias, at::MemoryFormat::Contiguous)
                               .normal_(0, std::sqrt(weights.of(leaf)), generator));
    }
    if (aliases_.empty()) return;
    values_ = at::_foreach_mul(aliases_, 1);  // copies, in few kernels
    at::_foreach_add_(aliases_, directions, epsilon);
  }
  ~MovedLeaves() {
    const at::AutoGradMode no_grad(false);
    if (!aliases_.empty()) at::_foreach_copy_(aliases_, values_);
  }
  MovedLeaves(const MovedLeaves&) = delete;
  MovedLeaves& operator=(const MovedLeaves&) = delete;

 private:
  std::vector<at::Tensor> aliases_, values_;
};

// Small enough that activations move linearly, large enough that the difference stands out from
// rounding, which takes more in 16 bits.
double epsilon_for(const State& state, const std::vector<at::Tensor>& leaves) {
  bool narrow = false, wide = !leaves.empty();
  for (const at::Tensor& leaf : leaves) {
    narrow |= leaf.element_size() < 4;
    wide &= leaf.element_size() == 8;
  }
  for (const Site& site : state.sites->sites()) narrow |= site.reference.element_bytes == 2;
  return narrow ? 1e-3 : wide ? 1e-6 : 2e-4;
}

bool is_leaf_to_move(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_leaf() && tensor.requires_grad() &&
         tensor.layout() == at::kStrided && tensor.is_floating_point() && tensor.has_storage() &&
         tensor.numel() > 0;
}

// A forward may write to parameters (a momentum encoder). Buffers are copied in any case.
std::vector<at::Tensor> parameters_of(const State& state) {
  std::vector<at::Tensor> tensors;
  for (const Parameter& parameter : state.model.parameters)
    if (!parameter.buffer) tensors.push_back(parameter.tensor);
  return tensors;
}

// Runs one pass of a probe. The first pass ends where its backward begins.
void run(const std::shared_ptr<State>& state, const std::shared_ptr<Probe>& probe, Probe::Pass pass,
         const std::function<void()>& step, int bits = 0) {
  struct Attached {
    State& state;
    ~Attached() { state.probing.running.reset(); }
  } attached{*state};
  probe->begin(pass, bits);
  state->probing.running = probe;
  const Undone undone(parameters_of(*state));
  const Entry entry(state);
  try {
    step();
  } catch (...) {
    if (pass != Probe::Pass::kMoved || !probe->backward_began()) throw;
  }
}

}  // namespace

Snapshot::Snapshot(const State& state, bool accumulates) {
  const at::AutoGradMode no_grad(false);
  std::vector<at::Device> devices = {at::Device(at::kCPU)};
  for (const Parameter& parameter : state.model.parameters) {
    const at::Tensor& tensor = parameter.tensor;
    if (std::find(devices.begin(), devices.end(), tensor.device()) == devices.end() &&
        tensor.is_cuda())
      devices.push_back(tensor.device());
    if (tensor.requires_grad()) {
      if (!tensor.is_leaf()) continue;
      Gradient& kept = gradients_.emplace_back(Gradient{tensor, tensor.grad(), {}});
      if (accumulates && kept.gradient.defined() && kept.gradient.has_storage() &&
          kept.gradient.storage().use_count() > 1)
        kept.values = kept.gradient.variable_data().clone();
    } else if (parameter.buffer && tensor.has_storage()) {
      buffers_.push_back(tensor.variable_data());
      copies_.push_back(buffers_.back().clone());
    }
  }
  for (const at::Device& device : devices) {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    const std::lock_guard lock(generator.mutex());
    generators_.emplace_back(generator, generator.get_state());
  }
  forget_gradients();
}

void Snapshot::forget_gradients() const {
  for (const Gradient& one : gradients_) at::Tensor(one.leaf).mutable_grad() = at::Tensor();
}

void Snapshot::rewind() const {
  const at::AutoGradMode no_grad(false);
  forget_gradients();
  if (!buffers_.empty()) at::_foreach_copy_(buffers_, copies_);
  for (auto [generator, values] : generators_) {
    const std::lock_guard lock(generator.mutex());
    generator.set_state(values);
  }
}

Snapshot::~Snapshot() {
  rewind();
  const at::AutoGradMode no_grad(false);
  for (const Gradient& one : gradients_) {
    if (one.values.defined()) one.gradient.variable_data().copy_(one.values);
    at::Tensor(one.leaf).mutable_grad() = one.gradient;
  }
}

namespace {

// Runs a step if there was none yet, to learn what is saved where.
void learn_sites(const std::shared_ptr<State>& state, const std::function<void()>& step,
                 const Snapshot& snapshot) {
  TORCH_CHECK(!state->blocks.entered, "calibrate cannot run inside the controller's block");
  if (state->blocks.steps > 0) return;
  {
    const Undone undone(parameters_of(*state));
    const Entry entry(state);
    step();
  }
  snapshot.rewind();
}

std::vector<at::Tensor> leaves_of(const State& state, const CalibrateOptions& options) {
  std::vector<at::Tensor> leaves = options.leaves;
  for (const at::Tensor& listed : tensors_of(state.model)) leaves.push_back(listed);
  std::erase_if(leaves, [](const at::Tensor& leaf) { return !is_leaf_to_move(leaf); });
  return leaves;
}

// Hides gradients from the guard that are not those of the user's training.
struct Paused {
  explicit Paused(State& paused) : state(paused) { pause_guard(state, true); }
  ~Paused() { pause_guard(state, false); }
  State& state;
};

std::vector<Codec> menu_of(const Policy& policy) {
  std::vector<Codec> menu;
  for (const Policy::NamedRule& entry : policy.menu()) menu.push_back(entry.rule.codec);
  return menu;
}

constexpr const char* kNoBackward =
    "step must run backward, but the tensors that it saved for backward were never read";

std::uint64_t seed_of(const State& state) {
  return rounding_seed(state) + static_cast<std::uint64_t>(state.blocks.steps);
}

// The gradients that a pass left in the leaves.
std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& leaves) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& leaf : leaves) gradients.push_back(leaf.grad());
  return gradients;
}

double total_energy(const std::vector<at::Tensor>& norms) {
  const std::vector<double> energies = read_energies(norms);
  return std::accumulate(energies.begin(), energies.end(), 0.0);
}

double squared_distance(const std::vector<at::Tensor>& leaves, const LeafWeights& weights,
                        const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  std::vector<at::Tensor> norms;
  for (std::size_t i = 0; i < leaves.size(); ++i)
    if (a[i].defined() && b[i].defined())
      norms.push_back(norm_of(a[i] - b[i]) * std::sqrt(weights.of(leaves[i])));
  return total_energy(norms);
}

// How errors count, by the gradients of the user's own step if it was watched, else by those of one
// more run.
LeafWeights weights_for(const std::shared_ptr<State>& state, const std::function<void()>& step,
                        const std::vector<at::Tensor>& leaves, const Snapshot& snapshot,
                        const CalibrateOptions& options) {
  const auto watched = options.arriving ? options.arriving : state->probing.arriving;
  if (watched && !watched->empty()) return watched->weights();
  const auto arriving = ArrivingGradients::at(leaves);
  const auto probe = std::make_shared<Probe>(seed_of(*state), 0, 1);
  probe->fold_only(nullptr, 0, 0);
  run(state, probe, Probe::Pass::kFolded, step);
  snapshot.rewind();
  return arriving->weights();
}

LeafWeights weights_for(const std::vector<at::Tensor>& leaves,
                        const std::vector<at::Tensor>& gradients) {
  std::vector<at::Tensor> norms;
  for (const at::Tensor& gradient : gradients)
    norms.push_back(gradient.defined() ? norm_of(gradient) : at::zeros({}));
  return {leaves, read_energies(norms)};
}

// The energy of the gradient that errors are compared with; none if the leaves have no gradient.
std::optional<double> energy_of(const std::vector<at::Tensor>& gradients, double scale) {
  std::vector<at::Tensor> norms;
  for (const at::Tensor& gradient : gradients)
    if (gradient.defined() && gradient.layout() == at::kStrided) norms.push_back(norm_of(gradient));
  if (norms.empty()) return std::nullopt;
  return scale * total_energy(norms);
}

// Measures what folding the starts of checkpoints does. A failure, as for want of memory, or of a
// segment whose shapes depend on values, leaves them exact.
void measure_starts(const std::shared_ptr<State>& state, const std::shared_ptr<Probe>& probe,
                    const std::function<void()>& step, const Snapshot& snapshot) {
  try {
    for (const int bits : probe->starts().widths()) {
      run(state, probe, Probe::Pass::kStarts, step, bits);
      snapshot.rewind();
    }
  } catch (const std::exception& error) {
    probe->starts().forget();
    snapshot.rewind();
    TORCH_WARN(
        "backfold: checkpoints could not be run again from rounded inputs, which stay "
        "exact: ",
        error.what());
  }
}

}  // namespace

int calibrate(const std::shared_ptr<State>& state, const std::function<void()>& step,
              const CalibrateOptions& options) {
  const Paused paused(*state);
  const Snapshot snapshot(*state, options.accumulates);
  learn_sites(state, step, snapshot);
  const std::vector<at::Tensor> leaves = leaves_of(*state, options);
  const double epsilon = state->probing.epsilon = epsilon_for(*state, leaves);
  const int least = least_width(*state);
  const std::optional<int> noisy_at = noisy_width(*state);
  const LeafWeights weights = weights_for(state, step, leaves, snapshot, options);
  const auto measure = [&] {
    const auto probe = std::make_shared<Probe>(seed_of(*state), epsilon, least, weights, noisy_at);
    probe->rankings().offer(menu_of(state->policy));
    {
      const MovedLeaves moved(leaves, weights, epsilon, seed_of(*state));
      run(state, probe, Probe::Pass::kMoved, step);
    }
    TORCH_CHECK_VALUE(probe->backward_began() || !probe->saved_something(), kNoBackward);
    snapshot.rewind();
    if (!probe->starts().widths().empty()) probe->starts().watch(leaves);
    run(state, probe, Probe::Pass::kClean, step);
    state->planning.gradient_energy = energy_of(gradients_of(leaves), options.scale);
    snapshot.rewind();
    measure_starts(state, probe, step, snapshot);
    return probe->finish(options.scale);
  };
  // Errors at few bits depend on the plan in force, so the first plan is made twice. Several
  // processes measure in another turn for that.
  const bool again = noisy_at && !state->planning.plan && !state->together.on();
  const int measured = measure();
  if (!again || measured == 0) return measured;
  replan(*state);
  return measure();
}

int calibrate_exactly(const std::shared_ptr<State>& state, const std::function<void()>& step,
                      const CalibrateOptions& options) {
  constexpr std::uint64_t kDraws = 2;
  const Paused paused(*state);
  const Snapshot snapshot(*state, options.accumulates);
  learn_sites(state, step, snapshot);
  const std::vector<at::Tensor> leaves = leaves_of(*state, options);
  const auto probe = std::make_shared<Probe>(seed_of(*state), 0, 1);
  probe->rankings().offer(menu_of(state->policy));
  const auto gradients = [&](const Site* only, int bits, std::uint64_t draw) {
    probe->fold_only(only, bits, draw);
    run(state, probe, Probe::Pass::kFolded, step);
    std::vector<at::Tensor> found = gradients_of(leaves);
    snapshot.rewind();
    return found;
  };
  const std::vector<at::Tensor> clean = gradients(nullptr, 0, 0);
  TORCH_CHECK_VALUE(
      std::any_of(clean.begin(), clean.end(), [](const auto& g) { return g.defined(); }),
      kNoBackward);
  probe->rankings().settle();
  state->planning.gradient_energy = energy_of(clean, options.scale);
  const LeafWeights weights = weights_for(leaves, clean);
  int measured = 0;
  for (Site& site : state->sites->sites()) {
    if (!probe->rankings().knows(site)) {
      site.sensitivity = {};
      continue;
    }
    Sensitivity found = probe->rankings().table(site);
    found.estimate = Sensitivity::Estimate::kExact;
    for (const int bits : probe->widths(site, root_of(site))) {
      double sum = 0;
      for (std::uint64_t draw = 0; draw < kDraws; ++draw)
        sum += squared_distance(leaves, weights, gradients(&site, bits, draw), clean);
      found.errors.emplace_back(bits, options.scale * sum / kDraws);
    }
    site.sensitivity = std::move(found);
    ++measured;
  }
  return measured;
}

}  // namespace backfold::torch_layer
