// SPDX-License-Identifier: Apache-2.0
//
// One entry of a controller: from the moment hooks are set on a thread until they are gone.

#ifndef BACKFOLD_TORCH_CAPTURE_ENTRY_H_
#define BACKFOLD_TORCH_CAPTURE_ENTRY_H_

#include <ATen/core/Tensor.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "backfold/report.h"
#include "torch/capture/calls.h"
#include "torch/codec/policy.h"
#include "torch/plan/guard.h"
#include "torch/plan/plan.h"
#include "torch/probe/probe.h"
#include "torch/store/saved.h"
#include "torch/store/store.h"

namespace backfold::torch_layer {

// What a controller knows from one entry to the next.
struct State {
  StoreOptions options;
  std::vector<std::string> keep;  // patterns for the names of regions
  Policy policy;                  // what the user says about codecs
  std::shared_ptr<SiteTable> sites = std::make_shared<SiteTable>();
  std::vector<Parameter> parameters;                       // and buffers
  std::unordered_map<const void*, std::uint32_t> modules;  // paths, by the module's identity
  std::int64_t steps = 0;
  std::optional<Target> target;           // of an adaptive controller
  StepReference reference;                // the largest step seen
  std::optional<double> gradient_energy;  // of the last pass that was measured
  std::set<std::string> told_kept;        // places that a warning has named
  std::optional<PlanSummary> plan;        // the last one
  // Called before each plan, with what was measured: where several processes train one model, here
  // they make it the same for all.
  std::function<void(std::vector<SiteRecord>&)> combine_tables;
  bool outgrown = false;         // a step was larger than the plan knew
  std::optional<double> noise;   // that the guard saw last
  std::unique_ptr<Guard> guard;  // of a model's parameters
  int guard_pauses = 0;          // that are open: gradients meanwhile are none of the user's
  std::shared_ptr<Probe> probe;  // while one runs
  // Whether entries belong to a probe, not to the user.
  bool probing() const { return probe && probe->pass() != Probe::Pass::kUsersOwn; }
  std::shared_ptr<Probe> own_probe;  // that went along with a step and waits for its backward
  bool inside_model = false;         // what is saved now will be measured by running it again
  double epsilon = 0;                // by which the last probe moved leaves
  std::optional<at::Device> device;  // whose allocator is asked what hooks do not see
  std::optional<std::int64_t> grown_bytes;  // allocated by the last step and not freed in it
  bool unmet_samples = false;               // ids were given, but for another batch
  // Of samples that have widths of their own. calibrate() packs nothing, so that its plan asks the
  // step that follows for them.
  enum class Scores { kKnown, kWanted, kTaken } scores = Scores::kKnown;
  bool unknown_modules = false;  // one was called since the modules were listed
  bool unplaced_sites = true;    // some were made while no module was watched
  bool watches_modules = true;   // whether the next entry is told of modules
  std::atomic<bool> entered{false};
  bool told_compiled = false;             // that graphs of torch.compile are not folded
  std::atomic<std::thread::id> thread{};  // of the entry
  std::atomic<bool> told_outside{false};  // that its model ran on a thread without an entry
};

class AllocationCount;

class Entry {
 public:
  explicit Entry(std::shared_ptr<State> state);
  ~Entry();
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;

  // The innermost entry of this thread, or null.
  static Entry* current();

  // Keeps a tensor that the running call saves. `obstacle` says why it cannot be packed, where the
  // caller knows of a reason.
  Saved save(const at::Tensor& tensor, const char* obstacle = nullptr);

  // A module's forward begins or ends. One that the controller does not know is named by its class
  // and its place among its siblings.
  void enter_module(const void* module, const char* class_name);
  void leave_module(const void* module);
  // The same for a region that a program names: null ends the innermost.
  void region(const char* name);

  State& state() { return *state_; }
  Store& store() { return store_; }

 private:
  // Whether the ends of calls are of interest: to a probe, or for the gradients of samples.
  bool observes_calls() const { return state_->probe || state_->options.samples.ids.defined(); }
  void note_reference();

  std::shared_ptr<State> state_;
  Entry* const outer_;
  Store store_;
  ModuleStack modules_;
  std::uint32_t landmark_ = 0;
  Counts occurrences_;                                          // since the landmark
  std::vector<std::pair<const void*, std::uint32_t>> unknown_;  // modules that are running
  std::vector<std::uint32_t> regions_;
  bool saved_something_ = false;
  std::int64_t saved_bytes_ = 0;
  std::shared_ptr<AllocationCount> allocations_;  // of an entry that only observes
  std::optional<std::int64_t> allocated_before_;
  CallWatch watch_;
};

// A module runs with gradients on a thread that is in no entry. True the first time that it belongs
// to the model of an entry elsewhere, or, as a `replica`, to any: nothing that it saves is folded.
bool missed(const void* module, bool replica);

// Keeps a tensor by reference, for a thread that is in no entry.
Saved save_outside(const at::Tensor& tensor);

// How hooks are set on the current thread. Where Python is loaded its binding registers the way
// that goes through Python; without, an engine of our own asks the current entry.
struct HookInstaller {
  void (*install)();
  void (*uninstall)();
};
void set_hook_installer(const HookInstaller& installer);
const HookInstaller& hook_installer();

// The narrowest width worth measuring for what the user wants.
int least_width(const State& state);
// The width of tensors without a plan where so few bits are wanted that errors multiply each other.
std::optional<int> noisy_width(const State& state);

// Raises, for a controller that is entered: RuntimeError.
[[noreturn]] void refuse_entered(const State& state);

// A guard of the parameters as they are listed now; null where none is wanted.
std::unique_ptr<Guard> guard_for(const State& state, std::uint64_t seed);
// Watches their gradients from now on.
void watch_gradients(State& state);
// Begins or ends a pause of the guard. Pauses may be inside one another.
void pause_guard(State& state, bool on);

// How the error that the plan expects compares with the gradient's own variance.
struct Noise {
  double ratio = 0;                // of the two
  std::vector<std::string> sites;  // that add most, the worst first
  std::optional<double> needed;    // value of the target that brings the ratio down to a tenth
};
// None until enough gradients were seen. Waits for the devices.
std::optional<Noise> noise_of(State& state);

// Makes a plan from the tables there are. Sites without one get its mean width.
void replan(State& state);

// Plans the widths of samples if a step has taken the scores that were wanted.
void settle_scores(State& state);

Report report_of(const State& state);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_CAPTURE_ENTRY_H_
