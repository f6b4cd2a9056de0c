// SPDX-License-Identifier: Apache-2.0
//
// What a controller knows from one block to the next, part by part as it is written, and what is
// done with all of it.

#ifndef BACKFOLD_TORCH_STATE_H_
#define BACKFOLD_TORCH_STATE_H_

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "torch/capture/site.h"
#include "torch/codec/policy.h"
#include "torch/codec/reused_memory.h"
#include "torch/peak.h"
#include "torch/plan/guard.h"
#include "torch/plan/noise.h"
#include "torch/plan/plan.h"
#include "torch/plan/remaking.h"
#include "torch/probe/probe.h"
#include "torch/store/step_memory.h"
#include "torch/store/store.h"
#include "torch/timeline.h"
#include "torch/together.h"
#include "torch/turns.h"

namespace backfold::torch_layer {

// The model, as whoever built the controller lists it.
struct ModelListing {
  std::vector<std::string> keep;                           // patterns for the names of regions
  std::vector<Parameter> parameters;                       // and buffers
  std::unordered_map<const void*, std::uint32_t> modules;  // paths, by the module's identity
  std::unordered_map<std::string, std::uint32_t> paths;
  bool sharded = false;          // parameters are shards of what modules compute with
  bool names_places = false;     // the user named some of these parts
  bool unknown_modules = false;  // one was called since the modules were listed
  bool unplaced_sites = true;    // some were made while no module was watched
  bool watches_modules = true;   // whether the next block is told of modules
};

// Written by blocks as they begin and end.
struct BlockHistory {
  std::int64_t steps = 0;              // blocks in which something was saved
  std::optional<at::Device> device;    // whose allocator is asked what hooks do not see
  std::optional<at::Device> saved_on;  // of what the last one saved first
  // Allocated by the last step and not freed in it, or offloaded.
  std::optional<std::int64_t> grown_bytes;
  bool unmet_samples = false;     // ids were given, but for another batch
  bool told_compiled = false;     // that graphs of torch.compile are not folded
  bool met_checkpoint = false;    // in the last one in which something was saved
  std::string wants_checkpoints;  // the level that does, until one was met or missed
  std::atomic<bool> entered{false};
  std::atomic<std::thread::id> thread{};  // of the open block
  std::atomic<bool> told_outside{false};  // that its model ran on a thread without a block
};

// Written by replan().
struct Planning {
  std::optional<Target> target;           // of an adaptive controller
  StepReference reference;                // the largest step seen
  std::optional<double> gradient_energy;  // of the last pass that was measured
  std::optional<PlanSummary> plan;        // the last one
  std::set<std::string> told_kept;        // places that a warning has named
  bool told_raised = false;               // that plans take more than was asked for
  bool told_sends = false;                // that a budget is not kept without offloading
  bool outgrown = false;                  // a step was larger than the plan knew
  // Of samples that have widths of their own. calibrate() packs nothing, so that its plan asks the
  // step that follows for them.
  enum class Scores { kKnown, kWanted, kTaken } scores = Scores::kKnown;
  // Bytes that a controller of exact tensors has to keep to. It makes no other plan.
  std::optional<Target> exact;
  // What running products again would take: nobody asks, the next step says, the last one has said,
  // a plan was made of it. Of several processes: this one knows, and they have yet to plan.
  enum class Products {
    kUnwanted,
    kWanted,
    kTimed,
    kPlanned,
    kRead
  } products = Products::kUnwanted;
  std::optional<RemadePlan> remade;
  bool sends = false;  // what some sites keep, for a budget
  PeakKeeping peak;
  bool marks_anew = false;  // without a plan of widths, tensors took more than they were to

  // What is kept to: by widths, or by exact tensors alone.
  const std::optional<Target>& any_target() const { return target ? target : exact; }
};

// Adds to a history of bounded length: when it is full, every second entry goes, never the newest.
template <typename Entry>
void remember(std::vector<Entry>& history, Entry entry) {
  constexpr std::size_t kMost = 256;
  if (history.size() == kMost) {
    for (std::size_t i = 0; 2 * i + 1 < kMost; ++i) history[i] = std::move(history[2 * i + 1]);
    history.resize(kMost / 2);
  }
  history.push_back(std::move(entry));
}

// Watches the gradients of the model's parameters.
struct Guarding {
  std::unique_ptr<Guard> guard;
  int pauses = 0;               // that are open: gradients meanwhile are none of the user's
  std::optional<double> noise;  // that the guard saw last
};

struct Probing {
  std::shared_ptr<Probe> running;
  std::shared_ptr<Probe> waiting;  // for the backward of the step that it went along with
  // What that backward brings the parameters. Null where no step is watched.
  std::shared_ptr<ArrivingGradients> arriving;
  bool inside_model = false;  // what is saved now will be measured by running it again
  double epsilon = 0;         // by which the last probe moved leaves

  // Whether blocks belong to a probe, not to the user.
  bool owns_blocks() const { return running && running->pass() != Probe::Pass::kUsersOwn; }
};

struct State {
  StoreOptions options;
  // What leaves its device: what a budget is not kept without, unless the user says otherwise.
  enum class Offloading { kNothing, kByPlan, kEverything } offloading = Offloading::kByPlan;
  std::shared_ptr<Offloader> offloader;  // null until something leaves
  Policy policy;                         // what the user says about codecs
  std::shared_ptr<SiteTable> sites = std::make_shared<SiteTable>();
  std::shared_ptr<Timeline> timeline = std::make_shared<Timeline>();
  ModelListing model;
  BlockHistory blocks;
  Planning planning;
  Guarding guarding;
  ReportHistory history;
  Probing probing;
  ProbeTurns turns;
  Together together;
  const ReusedMemoryUser memory;
  SpareMemory spare_memory;  // of the notes of the last block
  at::Tensor turn;           // of replays, on the device of the last block; see replays.h
};

// The seed of what this process rounds: processes that train together round differently, so that
// errors average out between them. Rank 0 rounds like a process that is alone.
std::uint64_t rounding_seed(const State& state);

// Options of the block that is about to begin: widths that are not planned follow the target.
StoreOptions options_now(State& state);

// Whether anything that the next block keeps leaves its device.
bool offloads(const State& state);
// Where the block that is about to begin sends what it keeps. Raises where the model's device has
// nowhere to send it.
Offload begin_trip(State& state);
// Plans have marked other sites than before.
void note_sends(State& state);

// The narrowest width worth measuring for what the user wants.
int least_width(const State& state);
// The width of tensors without a plan where so few bits are wanted that errors multiply each other.
std::optional<int> noisy_width(const State& state);

// Makes a plan from the tables there are. Sites without one get its mean width. For one process;
// several plan_together().
void replan(State& state);
// The plan for a target, from tables of one process or of several. `energy` is that of the
// gradient.
PlanSummary plan_for(const Target& target, SiteTable& sites, const StepReference& reference,
                     std::int64_t step, std::optional<double> energy);
// Puts a plan that was made for the controller's sites into force.
void adopt_plan(State& state, PlanSummary plan);
// Plans what products make again if a step has timed them. Where several processes plan, only reads
// these times: plan_exactly_together() does the rest.
void settle_products(State& state);
// Writes how long what a plan could have leave takes for it to the reference.
void look_at_link(State& state);
// Plans the widths of samples if a step has taken the scores that were wanted.
void settle_scores(State& state);

// Parameters and buffers.
std::vector<at::Tensor> tensors_of(const ModelListing& model);

// A guard of the parameters as they are listed now; null where none is wanted.
std::unique_ptr<Guard> guard_for(const State& state, std::uint64_t seed);
// Watches their gradients from now on.
void watch_gradients(State& state);
// Begins or ends a pause of the guard. Pauses may be inside one another.
void pause_guard(State& state, bool on);
// How the error that the plan expects compares with the gradient's own variance. None until enough
// gradients were seen. Waits for the devices.
std::optional<Noise> noise_of(State& state);

// After a block: what to tell the user, once, whose level needs checkpoints that the model does not
// make; empty if there is nothing to tell.
std::string missed_checkpoints(State& state);

// Raises, for a controller that is entered: RuntimeError.
[[noreturn]] void refuse_entered(const State& state);

Report report_of(const State& state);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_STATE_H_
