// SPDX-License-Identifier: Apache-2.0
//
// One entry of a controller: from the moment hooks are set on a thread until they are gone.

#ifndef BACKFOLD_TORCH_CAPTURE_ENTRY_H_
#define BACKFOLD_TORCH_CAPTURE_ENTRY_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "torch/capture/calls.h"
#include "torch/capture/site.h"
#include "torch/state.h"
#include "torch/store/saved.h"
#include "torch/store/store.h"

namespace backfold::torch_layer {

class AllocationCount;
class GraphPacket;
struct GraphDemand;
struct GraphPlace;

class Entry {
 public:
  explicit Entry(std::shared_ptr<State> state);
  ~Entry();
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;

  // The innermost entry of this thread, or null.
  static Entry* current();

  // Keeps a tensor that the running call saves; where none runs, `by` may say who does. `obstacle`
  // says why it cannot be packed, where the caller knows of a reason.
  Saved save(const at::Tensor& tensor, const char* obstacle = nullptr,
             const Operator* by = nullptr);

  // A call begins after which shapes, as far as the program follows it, depend on values.
  void decision();

  // The same for what a compiled graph saves; see graph.h.
  std::shared_ptr<GraphPacket> fold_in_graph(const at::Tensor& dense, const GraphDemand& demand,
                                             const GraphPlace& place);
  void keep_in_graph(const at::Tensor& tensor, const GraphPlace& place, std::string_view reason);

  // A module's forward begins or ends. One that the controller does not know is named by its class
  // and its place among its siblings.
  void enter_module(const void* module, const char* class_name);
  void leave_module(const void* module);
  // The same for a region that a program names: null ends the innermost.
  void region(const char* name);

  State& state() { return *state_; }
  Store& store() { return store_; }
  // The entry of this thread that this one is inside, or null.
  Entry* outer() const { return outer_; }

 private:
  // Whether the ends of calls are of interest: to a probe, or for the gradients of samples.
  bool observes_calls() const {
    return state_->probing.running || state_->options.samples.ids.defined();
  }
  ProductWatch products_watched() const { return store_.products_watched(); }
  // The block saves this, too.
  void count_save(const at::Tensor& tensor);
  Site& graph_site(std::string_view module, std::string_view name);
  // The module that has a parameter: where a site is taken to be until modules were watched.
  std::uint32_t owner_of(std::uint32_t landmark) const;
  void note_reference();
  // A checkpoint saves an input.
  void note_start(Site& site, const Operator& op);

  std::shared_ptr<State> state_;
  Entry* const outer_;
  Store store_;
  ModuleStack modules_;
  std::uint32_t landmark_ = 0;
  Counts occurrences_;                                          // since the landmark
  ska::flat_hash_map<std::uint64_t, int> graph_runs_;           // so far, by place
  std::vector<std::pair<const void*, std::uint32_t>> unknown_;  // modules that are running
  std::vector<std::uint32_t> regions_;
  // The inputs of the last checkpoint that compares shapes when it runs again, and the number of
  // nodes that there were.
  c10::SmallVector<Site*, 4> checkpoint_;
  std::uint64_t nodes_before_ = 0;
  std::size_t hooks_ = 0;  // on autograd's stack, up to ours
  bool met_checkpoint_ = false;
  bool saved_something_ = false;
  bool saved_where_counted_ = false;  // on the device whose allocations are
  std::int64_t saved_bytes_ = 0;
  std::shared_ptr<AllocationCount> allocations_;  // of an entry that only observes
  std::optional<std::int64_t> allocated_before_;
  CallWatch watch_;
};

// Called where a module runs with gradients on a thread without an entry. True, once, if it belongs
// to the model of an entry on another thread (a `replica` is taken to belong to any): what it saves
// is not folded.
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

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_CAPTURE_ENTRY_H_
