// SPDX-License-Identifier: Apache-2.0

#include "torch/capture/entry.h"

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <fnmatch.h>

#include <cstring>
#include <mutex>
#include <utility>

#include "torch/plan/sample_plan.h"

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

// Bytes that torch has allocated on a device; none on a CPU, where nobody counts.
std::optional<std::int64_t> allocated_bytes(const std::optional<at::Device>& device) {
  if (!device || !device->is_cuda()) return std::nullopt;
  constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const auto stats = c10::getDeviceAllocator(device->type())->getDeviceStats(device->index());
  return stats.allocated_bytes[kAll].current;
}

void observe_copy(const at::Tensor& source, const at::Tensor& copy) {
  if (current_entry) current_entry->store().remember_copy(source, copy);
}

// A norm has ended: its input can be packed.
void complete_waiting(const RunningCall& call, c10::ArrayRef<c10::IValue> results) {
  const at::DisableRecordFunctionGuard unwatched;
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
  if (current_entry) current_entry->store().about_to_write(tensor);
}

void observe_region(const char* name) {
  if (current_entry) current_entry->region(name);
}

bool is_gelu_by_tanh(const RunningCall& call) {
  return call.op->name == "aten::gelu" && !call.arguments.empty() &&
         Call(*call.op->schema, call.arguments)["approximate"].toStringRef() == "tanh";
}

// The probe of the current entry, if it watches what runs now.
Probe* watching_probe() {
  if (!current_entry || current_entry->state().inside_model) return nullptr;
  return current_entry->state().probe.get();
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

// Options of an entry: widths that are not planned follow the target.
StoreOptions options_now(State& state) {
  if (state.target && !state.probing()) {
    if (!state.plan)
      state.options.bits = uniform_width(*state.sites, state.reference, *state.target, state.steps);
    if (state.plan && std::exchange(state.outgrown, false)) replan(state);
    settle_scores(state);
  }
  StoreOptions options = state.options;
  options.spares_small = state.target && state.target->kind == Target::Kind::kBits && !state.plan;
  options.wants_scores = state.probe || state.scores == State::Scores::kWanted;
  return options;
}

}  // namespace

// What the CPU allocator gives and takes back on one thread, which it tells profilers.
class AllocationCount : public c10::MemoryReportingInfoBase {
 public:
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
      store_(options_now(*state_), state_->sites, state_->policy, state_->parameters),
      allocated_before_(allocated_bytes(state_->device)) {
  hook_installer().install();  // first, as it may raise
  if (state_->options.observe_only && !allocated_before_) {
    allocations_ = std::make_shared<AllocationCount>();
    c10::ThreadLocalDebugInfo::_push(c10::DebugInfoKind::PROFILER_STATE, allocations_);
    allocated_before_ = 0;
  }
  observe_copies(observe_copy);
  observe_waiting(complete_waiting);
  observe_writes(observe_write);
  observe_regions(observe_region);
  if (observes_calls()) observe_calls(observe_begin, observe_end);
  state_->thread = std::this_thread::get_id();
  current_entry = this;
  if (state_->guard && state_->guard_pauses == 0 && !state_->probing()) state_->guard->begin_step();
  const std::lock_guard lock(entered().mutex);
  entered().states.push_back(state_.get());
}

Entry::~Entry() {
  {
    const std::lock_guard lock(entered().mutex);
    std::erase(entered().states, state_.get());
  }
  current_entry = outer_;
  if (observes_calls()) observe_calls(nullptr, nullptr);
  hook_installer().uninstall();
  if (allocations_) c10::ThreadLocalDebugInfo::_pop(c10::DebugInfoKind::PROFILER_STATE);
  if (saved_something_ && allocated_before_) {
    const std::int64_t now = allocations_ ? allocations_->net() : *allocated_bytes(state_->device);
    state_->grown_bytes = now - *allocated_before_;
  }
  if (state_->options.observe_only) store_.judge_alive();
  if (!state_->probing()) {
    state_->unmet_samples =
        state_->options.samples.ids.defined() && saved_something_ && !store_.met_samples();
    state_->options.samples = {};  // those of one block
    if (saved_something_ && state_->scores == State::Scores::kWanted)
      state_->scores = State::Scores::kTaken;
  }
  if (saved_something_ && state_->target) note_reference();
  state_->entered = false;
}

void Entry::note_reference() {
  StepReference& reference = state_->reference;
  if (saved_bytes_ < reference.saved_bytes) return;
  state_->outgrown |= state_->plan && saved_bytes_ > reference.saved_bytes;
  reference = {.saved_bytes = saved_bytes_};
  for (Site& site : state_->sites->sites()) {
    const Ledger& ledger = site.ledger;
    if (ledger.step != state_->steps || ledger.kind == Kind::kParameter) continue;
    site.reference = ledger.lossy;
    // What a rule is for is no business of the plan.
    if (ledger.lossy.elements == 0 || site.rule != Policy::kNone)
      reference.fixed_bytes += ledger.held_bytes;
    if (ledger.kind != Kind::kAlive) reference.unique_bytes += ledger.unique_bytes;
  }
}

static int uniform_width_of(const State& state) {
  return uniform_width(*state.sites, state.reference, *state.target, state.steps);
}

int least_width(const State& state) {
  // Far below the mean few tensors go.
  return state.target && uniform_width_of(state) >= 4 ? 2 : 1;
}

std::optional<int> noisy_width(const State& state) {
  if (!state.target) return std::nullopt;
  const int width = uniform_width_of(state);
  return width < 3 ? std::optional(width) : std::nullopt;
}

// Names each place once.
static void tell_of_kept(State& state) {
  std::string names;
  for (const std::string& name : state.plan->kept)
    if (state.told_kept.insert(name).second) names += (names.empty() ? "" : ", ") + name;
  if (names.empty()) return;
  TORCH_WARN("backfold: rounding ", names,
             " would add more to the gradient than the gradient itself has: kept as they are, "
             "beyond what was asked for");
}

void replan(State& state) {
  if (state.combine_tables) {
    std::vector<SiteRecord> records = state.sites->records_by_name();  // as in every process
    state.combine_tables(records);
    state.sites->take_tables(records);
  }
  state.plan =
      make_plan(*state.sites, state.reference, *state.target, state.steps, state.gradient_energy);
  tell_of_kept(state);
  int width = 1;
  for (const int one : kWidths)
    if (one <= state.plan->mean_bits) width = one;
  state.options.bits = width;
  if (!plan_samples(*state.sites, state.policy)) state.scores = State::Scores::kWanted;
}

void settle_scores(State& state) {
  if (state.scores != State::Scores::kTaken) return;
  plan_samples(*state.sites, state.policy);
  state.scores = State::Scores::kKnown;
}

void refuse_entered(const State& state) {
  TORCH_CHECK(state.thread == std::this_thread::get_id(),
              "this controller is entered on another thread: give each thread its own");
  TORCH_CHECK(false, "this controller is entered already: its block cannot be inside itself");
}

bool missed(const void* module, bool replica) {
  const std::lock_guard lock(entered().mutex);
  for (State* state : entered().states)
    if (replica || state->modules.contains(module)) return !state->told_outside.exchange(true);
  return false;
}

Saved Entry::save(const at::Tensor& tensor, const char* obstacle) {
  static thread_local RunningCall outside;
  RunningCall* call = running_call();
  if (!call) {
    outside = RunningCall();
    outside.op = &unannounced();
    call = &outside;
  }
  if (!call->saved) {
    call->saved = true;
    for (const auto& [argument, position] : call->tensors) {
      const auto alive = c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(argument);
      const std::uint32_t landmark = store_.landmark_of(at::Tensor(alive));
      if (landmark == 0) continue;
      landmark_ = landmark;
      occurrences_.clear();
      break;
    }
  }
  if (call->op->compiled && !std::exchange(state_->told_compiled, true)) {
    TORCH_WARN(
        "backfold: what a graph of torch.compile saves is kept as it is: hooks see it only at the "
        "graph's border, where folding would not lower the peak.");
  }
  const Demand demand = demand_of(*call, tensor);
  const std::uint64_t key = std::uint64_t{call->op->id} << 8 | static_cast<unsigned>(demand.slot);
  Site& site = state_->sites->site(landmark_, *call->op, demand.slot, occurrences_.next(key));
  if (state_->probing()) return state_->probe->save(tensor, site, demand, *call, state_->sites);
  if (state_->watches_modules) {
    site.path = modules_.path();
    site.placed = true;
  } else if (!site.placed) {
    state_->unplaced_sites = true;
  }
  if (!saved_something_) {
    saved_something_ = true;
    ++state_->steps;
    state_->grown_bytes.reset();
  }
  saved_bytes_ += saved_bytes(tensor);
  std::shared_ptr<StandIn> stand_in;
  if (state_->probe && !obstacle && !state_->inside_model)
    stand_in = state_->probe->note(tensor, site, demand, *call);
  const bool tanh = !state_->policy.empty() && is_gelu_by_tanh(*call);
  Saved saved = store_.save(tensor, site, demand, state_->steps, obstacle, tanh);
  if (auto packet = store_.take_waiting()) call->waiting.push_back(std::move(packet));
  if (stand_in) saved.stand_in(std::move(stand_in));
  if (state_->options.samples.ids.defined() && site.ledger.kind == Kind::kPerSample)
    call->sampled.push_back(&site);
  return saved;
}

void Entry::enter_module(const void* module, const char* class_name) {
  const auto known = state_->modules.find(module);
  if (known != state_->modules.end()) {
    modules_.enter(known->second);
    return;
  }
  state_->unknown_modules = true;
  const char* dot = std::strrchr(class_name, '.');
  const char* name = dot ? dot + 1 : class_name;
  const int ordinal = modules_.children().next(reinterpret_cast<std::uintptr_t>(class_name));
  const std::uint32_t path = state_->sites->path_within(modules_.path(), name, ordinal);
  unknown_.emplace_back(module, path);
  modules_.enter(path);
}

void Entry::leave_module(const void* module) {
  if (const auto known = state_->modules.find(module); known != state_->modules.end()) {
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
  if (!state_->modules.empty()) return;
  if (!name) {
    if (regions_.empty()) return;
    modules_.leave(regions_.back());
    regions_.pop_back();
    return;
  }
  const std::uint32_t path = state_->sites->path_within(modules_.path(), name, 0);
  state_->sites->add_rules(path, state_->policy.rules_for(state_->sites->path(path).name));
  for (const std::string& pattern : state_->keep)
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
