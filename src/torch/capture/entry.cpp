// SPDX-License-Identifier: Apache-2.0

#include "torch/capture/entry.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/SequenceNumber.h>
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <fnmatch.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#include "torch/capture/borrowed.h"
#include "torch/codec/reused_memory.h"
#include "torch/device_memory.h"
#include "torch/reads/demand.h"
#include "torch/reads/recipes.h"
#include "torch/replays.h"

namespace backfold::torch_layer {
namespace {

thread_local Entry* current_entry = nullptr;

// States of the controllers that are entered, on any thread.
struct Entered {
  std::mutex mutex;
  std::vector<State*> states;
};
Entered& entered() {
  static Entered& instance = *new Entered;
  return instance;
}

// Saves that no call announces: C++ functions of other libraries that are no operators.
const Operator& unannounced() {
  static const Operator& op = *[] {
    auto* made = new Operator;
    made->name = "unknown operation";
    made->id = 0xffffff;
    made->opaque = true;
    return made;
  }();
  return op;
}

std::optional<std::int64_t> allocated_bytes(const std::optional<at::Device>& device) {
  const auto memory = device_memory(device);
  return memory ? std::optional(memory->now) : std::nullopt;
}

void observe_copy(const at::Tensor& source, const at::Tensor& copy) {
  if (current_entry) current_entry->store().remember_copy(source, copy);
}

// A norm has ended: its input can be packed.
void complete_waiting(const RunningCall& call, c10::ArrayRef<c10::IValue> results) {
  const Unwatched unwatched;
  for (const auto& packet : call.waiting) {
    try {
      packet->complete(results);
    } catch (const c10::Error& error) {
      TORCH_WARN_ONCE("backfold: the input of a norm could not be packed and is kept as it is: ",
                      error.what_without_backtrace());
    }
  }
}

void observe_write(const at::Tensor& tensor) {
  // Outer entries save nothing now, but what they saved may be made again from the tensor.
  for (Entry* entry = current_entry; entry; entry = entry->outer())
    entry->store().about_to_write(tensor);
}

void observe_overwrite(RunningCall& call) {
  if (current_entry) current_entry->store().note_overwritten(call);
}

void observe_made(RunningCall& call, c10::ArrayRef<c10::IValue> results) {
  if (!current_entry || !at::GradMode::is_enabled() || results.empty() || !results[0].isTensor())
    return;
  current_entry->store().record(call, results[0].toTensor(), results);  // runs no operator
}

void observe_region(const char* name) {
  if (current_entry) current_entry->region(name);
}

bool is_gelu_by_tanh(const RunningCall& call) {
  return call.op->name == "aten::gelu" && !call.arguments.empty() &&
         Call(*call.op->schema, call.arguments)["approximate"].toStringRef() == "tanh";
}

// Whether a call that is not recorded yet saves what it made, which is then recorded first.
bool saves_its_result(const RunningCall& call, const Demand& demand, const at::Tensor& tensor) {
  const Recipe* recipe = call.op->recipe;
  if (!recipe || recipe->companions > 0 || call.recorded) return false;
  if (call.overwritten) return Counter(tensor).now() != call.overwritten->version;
  return demand.slot >= static_cast<int>(call.op->slots.size());
}

// Whether a pass of another controller's probe runs here, which nothing else may fold in: it would
// take the noise for the doing of what it measures. A pass runs backward on threads of its own.
bool is_probed_by_another(Entry& entry) {
  // A C++ program may enter its own controller in the step that is measured.
  const auto probes = [&](const State& state) {
    return &state != &entry.state() && state.probing.owns_blocks();
  };
  for (Entry* outer = entry.outer(); outer; outer = outer->outer())
    if (probes(outer->state())) return true;
  if (torch::autograd::get_current_graph_task_id() == -1) return false;
  const std::lock_guard lock(entered().mutex);
  return std::any_of(entered().states.begin(), entered().states.end(),
                     [&](const State* state) { return probes(*state); });
}

void observe_decision() {
  if (current_entry) current_entry->decision();
}

// The probe of the current entry, if it watches what runs now.
Probe* watching_probe() {
  if (!current_entry || current_entry->state().probing.inside_model) return nullptr;
  return current_entry->state().probing.running.get();
}

void observe_begin(const RunningCall& call) {
  if (Probe* probe = watching_probe()) probe->call_begins(call);
}

void observe_end(const RunningCall& call, c10::ArrayRef<c10::IValue> results) {
  if (!call.sampled.empty() && current_entry && !results.empty() && results[0].isTensor()) {
    std::vector<std::shared_ptr<CodecMemory>> memories;
    for (const Site* site : call.sampled) memories.push_back(site->memory);
    watch_norms(results[0].toTensor(), std::move(memories), current_entry->state().options.samples);
  }
  if (Probe* probe = watching_probe()) probe->call_ended(call, results);
}

}  // namespace

namespace profiler = torch::profiler::impl;

// What the CPU allocator gives and takes back on one thread, which it tells profilers. torch takes
// whatever stands in for a profiler to be of this base class, and reads its settings.
class AllocationCount : public profiler::ProfilerStateBase {
 public:
  AllocationCount()
      : ProfilerStateBase(profiler::ProfilerConfig(profiler::ProfilerState::Disabled)) {}
  profiler::ActiveProfilerType profilerType() override {
    return profiler::ActiveProfilerType::NONE;
  }
  void reportMemoryUsage(void*, std::int64_t bytes, std::size_t, std::size_t,
                         c10::Device device) override {
    if (device.is_cpu()) net_ += bytes;
  }
  bool memoryProfilingEnabled() const override { return true; }
  std::int64_t net() const { return net_; }

 private:
  std::int64_t net_ = 0;
};

Entry* Entry::current() { return current_entry; }

Entry::Entry(std::shared_ptr<State> state)
    : state_(std::move(state)),
      outer_(current_entry),
      // In braces, as the trip depends on what the options have planned.
      store_{options_now(*state_), state_->sites,       state_->policy,  state_->model.parameters,
             state_->spare_memory, begin_trip(*state_), state_->timeline},
      allocated_before_(allocated_bytes(state_->blocks.device)) {
  hook_installer().install();  // first, as it may raise
  hooks_ = at::SavedTensorDefaultHooks::get_tls_state().stack.size();
  if (state_->options.observe_only && !allocated_before_) {
    allocations_ = std::make_shared<AllocationCount>();
    c10::ThreadLocalDebugInfo::_push(c10::DebugInfoKind::PROFILER_STATE, allocations_);
    allocated_before_ = 0;
  }
  const bool is_measured = !state_->probing.owns_blocks() && !is_captured(*state_);
  if (is_measured) begin_peak(*state_);
  age_reused_memory();
  observe_copies(observe_copy);
  observe_waiting(complete_waiting);
  observe_writes(observe_write);
  observe_recipes(observe_overwrite, observe_made);
  observe_regions(observe_region);
  observe_decisions(observe_decision);
  watch_products(products_watched());
  if (observes_calls()) observe_calls(observe_begin, observe_end);
  state_->blocks.thread = std::this_thread::get_id();
  current_entry = this;
  if (state_->guarding.guard && state_->guarding.pauses == 0 && is_measured)
    state_->guarding.guard->begin_step();
  const std::lock_guard lock(entered().mutex);
  entered().states.push_back(state_.get());
}

Entry::~Entry() {
  {
    const std::lock_guard lock(entered().mutex);
    std::erase(entered().states, state_.get());
  }
  current_entry = outer_;
  watch_products(outer_ ? outer_->products_watched() : ProductWatch{});
  if (observes_calls()) observe_calls(nullptr, nullptr);
  hook_installer().uninstall();
  try {
    store_.send_references();
    if (saved_something_ && !state_->probing.owns_blocks()) wait_for_budget(*state_);
  } catch (const std::exception&) {  // they stay
  }
  if (saved_something_) state_->timeline->end_block();
  if (allocations_) c10::ThreadLocalDebugInfo::_pop(c10::DebugInfoKind::PROFILER_STATE);
  if (saved_where_counted_ && allocated_before_) {
    const std::int64_t now =
        allocations_ ? allocations_->net() : *allocated_bytes(state_->blocks.device);
    state_->blocks.grown_bytes = now - *allocated_before_ + store_.away_bytes();
  }
  if (state_->options.observe_only) store_.judge_alive();
  if (!state_->probing.owns_blocks()) {
    state_->blocks.unmet_samples =
        state_->options.samples.ids.defined() && saved_something_ && !store_.met_samples();
    state_->options.samples = {};  // those of one block
    if (saved_something_ && state_->planning.scores == Planning::Scores::kWanted)
      state_->planning.scores = Planning::Scores::kTaken;
  }
  Planning& planning = state_->planning;
  const bool users_own = saved_something_ && !state_->probing.owns_blocks();
  if (saved_something_ && (planning.target || planning.exact)) note_reference();
  if (users_own && products_watched().times) planning.products = Planning::Products::kTimed;
  if (users_own) state_->blocks.met_checkpoint = met_checkpoint_;
  state_->blocks.entered = false;
}

void Entry::note_reference() {
  Planning& planning = state_->planning;
  StepReference& reference = planning.reference;
  // Those of products are of the last step that was timed.
  const bool times = planning.products == Planning::Products::kWanted;
  planning.peak.saved_bytes = saved_bytes_;
  if (saved_bytes_ < reference.saved_bytes && !(planning.exact && times)) return;
  const bool outgrown = saved_bytes_ > reference.saved_bytes;
  planning.outgrown |= planning.plan && outgrown;
  if (outgrown) {
    planning.peak.watches = true;
    planning.peak.planned = false;  // for less
    planning.peak.corrections = 0;
    reference.moments.clear();
    reference.margin = 0;
  }
  using Products = Planning::Products;
  if (outgrown && (planning.products == Products::kPlanned || planning.products == Products::kRead))
    planning.products = Products::kWanted;
  reference.saved_bytes = saved_bytes_;
  reference.fixed_bytes = reference.unique_bytes = 0;
  for (Site& site : state_->sites->sites()) {
    const Ledger& ledger = site.ledger;
    if (ledger.step != state_->blocks.steps || ledger.kind == Kind::kParameter) continue;
    site.reference = ledger.lossy.elements > 0 ? ledger.lossy : ledger.apart;
    // What a rule is for is no business of the plan.
    if (ledger.lossy.elements == 0 || site.rule != Policy::kNone)
      reference.fixed_bytes += ledger.held_bytes;
    if (site.remaking && site.remaking->exact) reference.fixed_bytes += ledger.remade_bytes;
    if (ledger.kind != Kind::kAlive) reference.unique_bytes += ledger.unique_bytes;
  }
}

bool missed(const void* module, bool replica) {
  const std::lock_guard lock(entered().mutex);
  for (State* state : entered().states)
    if (replica || state->model.modules.contains(module))
      return !state->blocks.told_outside.exchange(true);
  return false;
}

void Entry::count_save(const at::Tensor& tensor) {
  if (!saved_something_) {
    saved_something_ = true;
    ++state_->blocks.steps;
    state_->blocks.saved_on = tensor.device();
    state_->blocks.grown_bytes.reset();
    const bool watches = state_->planning.peak.watched && !state_->probing.owns_blocks();
    state_->timeline->begin(state_->blocks.steps, watches, state_->blocks.device);
  }
  saved_where_counted_ |= allocations_ || tensor.device() == state_->blocks.device;
  saved_bytes_ += saved_bytes(tensor);
}

void Entry::decision() {
  // Inside of a checkpoint its hooks are on top of ours. In backward that is one of any.
  if (at::SavedTensorDefaultHooks::get_tls_state().stack.size() <= hooks_ ||
      torch::autograd::get_current_graph_task_id() != -1)
    return;
  for (Site* site : checkpoint_) {
    site->decides = true;
    site->choice.reset();
    site->sensitivity = {};
  }
}

void Entry::note_start(Site& site, const Operator& op) {
  met_checkpoint_ = true;
  site.starts = true;
  if (op.name == "CheckpointFunction") return;  // compares nothing
  const std::uint64_t nodes = at::sequence_number::peek();
  if (std::exchange(nodes_before_, nodes) != nodes) checkpoint_.clear();
  checkpoint_.push_back(&site);
}

Saved Entry::save(const at::Tensor& tensor, const char* obstacle, const Operator* by) {
  if (is_probed_by_another(*this)) return save_outside(tensor);
  static thread_local RunningCall outside;
  RunningCall* call = running_call();
  if (!call) {
    outside = RunningCall();
    outside.op = by ? by : &unannounced();
    call = &outside;
  }
  if (!call->saved) {
    call->saved = true;
    for (const auto& [argument, position] : call->tensors) {
      const std::uint32_t landmark = store_.landmark_of(*Borrowed(argument));
      if (landmark == 0) continue;
      landmark_ = landmark;
      occurrences_.clear();
      break;
    }
  }
  if (call->op->compiled && !state_->probing.owns_blocks() &&
      !std::exchange(state_->blocks.told_compiled, true)) {
    TORCH_WARN(
        "backfold: what a graph of torch.compile saves is kept as it is: hooks see it only at the "
        "graph's border, where folding would not lower the peak.");
  }
  Demand demand = demand_of(*call, tensor);
  // A checkpoint inside of what another one runs again is read at once.
  if (demand.reads == Reads::kStart && torch::autograd::get_current_graph_task_id() != -1)
    demand.reads = Reads::kExactly;
  if (saves_its_result(*call, demand, tensor)) store_.record(*call, tensor, {});
  const std::uint64_t key = std::uint64_t{call->op->id} << 8 | static_cast<unsigned>(demand.slot);
  Site& site = state_->sites->site(landmark_, *call->op, demand.slot, occurrences_.next(key));
  if (demand.reads == Reads::kStart) note_start(site, *call->op);
  if (site.decides) {
    demand.reads = Reads::kExactly;
    demand.reason = "what runs again from it depends on comparisons: shapes could differ";
  }
  if (state_->probing.owns_blocks())
    return state_->probing.running->save(tensor, site, demand, *call, state_->sites, store_);
  if (state_->model.watches_modules) {
    site.path = modules_.path();
    site.placed = true;
  } else if (!site.placed) {
    state_->model.unplaced_sites = true;
    if (site.path == 0) site.path = owner_of(landmark_);
  }
  count_save(tensor);
  std::shared_ptr<StandIn> stand_in;
  if (state_->probing.running && !obstacle && !state_->probing.inside_model)
    stand_in = state_->probing.running->note(tensor, site, demand, *call);
  const bool tanh = !state_->policy.empty() && is_gelu_by_tanh(*call);
  Saved saved = store_.save(tensor, site, demand, state_->blocks.steps, obstacle, tanh);
  if (auto packet = store_.take_waiting()) call->waiting.push_back(std::move(packet));
  if (stand_in) saved.stand_in(std::move(stand_in));
  if (state_->options.samples.ids.defined() && site.ledger.kind == Kind::kPerSample)
    call->sampled.push_back(&site);
  return saved;
}

std::uint32_t Entry::owner_of(std::uint32_t landmark) const {
  const std::string& name = state_->sites->landmark_name(landmark);
  const std::size_t dot = name.rfind('.');
  const auto found = state_->model.paths.find(name.substr(0, dot == name.npos ? 0 : dot));
  return found == state_->model.paths.end() ? 0 : found->second;
}

void Entry::enter_module(const void* module, const char* class_name) {
  const auto known = state_->model.modules.find(module);
  if (known != state_->model.modules.end()) {
    modules_.enter(known->second);
    return;
  }
  state_->model.unknown_modules = true;
  const char* dot = std::strrchr(class_name, '.');
  const char* name = dot ? dot + 1 : class_name;
  const int ordinal = modules_.children().next(reinterpret_cast<std::uintptr_t>(class_name));
  const std::uint32_t path = state_->sites->path_within(modules_.path(), name, ordinal);
  unknown_.emplace_back(module, path);
  modules_.enter(path);
}

void Entry::leave_module(const void* module) {
  if (const auto known = state_->model.modules.find(module); known != state_->model.modules.end()) {
    modules_.leave(known->second);
    return;
  }
  for (std::size_t i = unknown_.size(); i-- > 0;) {
    if (unknown_[i].first != module) continue;
    modules_.leave(unknown_[i].second);
    unknown_.resize(i);
    return;
  }
}

void Entry::region(const char* name) {
  // Where modules are known by identity their names are better, and a profiler's annotations ("step
  // 17") would only split sites.
  if (!state_->model.modules.empty()) return;
  if (!name) {
    if (regions_.empty()) return;
    modules_.leave(regions_.back());
    regions_.pop_back();
    return;
  }
  const std::uint32_t path = state_->sites->path_within(modules_.path(), name, 0);
  state_->sites->add_rules(path, state_->policy.rules_for(state_->sites->path(path).name));
  for (const std::string& pattern : state_->model.keep)
    if (fnmatch(pattern.c_str(), state_->sites->path(path).name.c_str(), 0) == 0)
      state_->sites->keep_path(path);
  regions_.push_back(path);
  modules_.enter(path);
}

Saved save_outside(const at::Tensor& tensor) {
  static const auto& sites = *new std::shared_ptr<SiteTable>(std::make_shared<SiteTable>());
  static Site& site = sites->site(0, unannounced(), 0, 0);
  return Saved(tensor, site, sites, {}, tensor.tensor_data(), nullptr);
}

}  // namespace backfold::torch_layer
