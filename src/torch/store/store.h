// SPDX-License-Identifier: Apache-2.0
//
// The store: decides how a saved tensor is kept, and keeps it once, however many nodes save it.
//
// It lives for one entry of a controller. It finds what an earlier save left by the storage's
// address, and holds a weak reference to each storage that it knows, so that the address cannot be
// given to another while it is in the table. It owns no packet and no tensor.

#ifndef BACKFOLD_TORCH_STORE_STORE_H_
#define BACKFOLD_TORCH_STORE_STORE_H_

#include <ATen/core/Tensor.h>
#include <c10/util/flat_hash_map.h>

#include <deque>
#include <memory>
#include <memory_resource>
#include <optional>
#include <utility>

#include "torch/capture/site.h"
#include "torch/codec/coding.h"
#include "torch/codec/policy.h"
#include "torch/plan/sample_norms.h"
#include "torch/reads/demand.h"
#include "torch/store/saved.h"
#include "torch/store/step_memory.h"
#include "torch/store/tracked.h"
#include "torch/store/treatment.h"
#include "torch/store/width.h"

namespace backfold::torch_layer {

struct StoreOptions : WidthRules {
  std::int64_t min_bytes = 0;  // smaller tensors are passed through
  std::uint64_t seed = 0;
  bool observe_only = false;    // pack nothing, count everything
  bool derive = true;           // make again what a recipe can
  bool bytes_first = false;     // also what takes longer than a packet of its own would
  bool products = false;        // may be run again where a site is marked so
  bool times_products = false;  // and sites note what that would take
  bool wants_scores = false;    // of samples whose widths are about to be planned
  SampleIds samples;            // of the batch, where the user gave them
  // Parameters are gathered from several processes into memory that their owner frees and fills
  // again (FSDP): what is listed are shards.
  bool sharded = false;
  const std::uint32_t* turn = nullptr;  // of a block that is captured into a CUDA graph
};

// Whether a tensor, or what it is a view of, is a parameter by its class. Asked for sharded models
// only, whose gathered parameters are in no list; a program without Python has no such classes.
using ParameterTest = bool (*)(const at::Tensor&);
void recognise_parameters_by(ParameterTest test);

// A parameter or buffer of the model.
struct Parameter {
  at::Tensor tensor;
  std::uint32_t landmark = 0;
  bool buffer = false;  // a forward may change it
};

// Where the block sends what it keeps; null where everything stays.
struct Offload {
  std::shared_ptr<Offloader> offloader;
  std::shared_ptr<Trip> trip;
  bool everything = false;  // or what the plan says
};

class Store {
 public:
  // Storages of `parameters` are never packed. The policy and the memory belong to the caller.
  Store(const StoreOptions& options, std::shared_ptr<SiteTable> sites, Policy& policy,
        const std::vector<Parameter>& parameters, SpareMemory& memory, Offload offload,
        std::shared_ptr<Timeline> timeline);

  // The landmark that a tensor is, or is a view or low-precision copy of; 0 for other tensors.
  std::uint32_t landmark_of(const at::Tensor& tensor) const;

  // `obstacle`, if given, says why the tensor cannot be packed; `tanh`, that GELU saves it for its
  // approximation by tanh.
  Saved save(const at::Tensor& tensor, Site& site, const Demand& demand, std::int64_t step,
             const char* obstacle, bool tanh);

  // The packet of the last save, if it waits for the end of the running call.
  std::shared_ptr<SharedPacket> take_waiting() { return std::exchange(waiting_, nullptr); }

  // aten::_to_copy made `copy` of `source`: remembered where the source is a parameter. A buffer is
  // not: it is the program's to change, through .data as well, where no version tells.
  void remember_copy(const at::Tensor& source, const at::Tensor& copy);

  // A call of this thread will write into the tensor next. What would be made again from it, and
  // was saved, is made now.
  void about_to_write(const at::Tensor& tensor);

  // A call with a recipe will write over its first argument next.
  void note_overwritten(RunningCall& call);
  // A call with a recipe has made `result`: how is remembered, if it can be made again. `results`
  // are all of its results, or none while it still runs.
  void record(RunningCall& call, const at::Tensor& result, c10::ArrayRef<c10::IValue> results);

  // For passes that fold nothing: a reference to the tensor, which stands for it in derivations;
  // and how the tensor would be made again from such references, if it would.
  std::shared_ptr<Hold> refer_to(const at::Tensor& tensor);
  at::Tensor copied_by(const at::Tensor& tensor) const;
  std::shared_ptr<Derived> derivation_of(const at::Tensor& tensor, Site& site);

  // The block ends: references that nothing else has leave the device, if anything does.
  void send_references();
  // Bytes that have left it.
  std::int64_t away_bytes() const { return offload_.trip ? offload_.trip->away_bytes() : 0; }

  // How what a compiled graph keeps leaves; none where it stays.
  std::optional<Passage> way_out(Site& site) const;

  const StoreOptions& options() const { return options_; }

  // What calls of products have to be watched for.
  ProductWatch products_watched() const { return {options_.products, options_.times_products}; }

  // The key of the next packet of a site.
  Key next_key(Site& site, std::int64_t step) const;

  // Whether a tensor that is kept per sample had as many samples as there were ids.
  bool met_samples() const { return met_samples_; }

  // In an entry that only observes: marks the sites whose storages the program holds, too.
  void judge_alive();

 private:
  struct Saving;

  Saved keep(Saving& saving, const char* why_not, bool tanh);
  struct Known {
    std::uint32_t landmark = 0;
    bool buffer = false;
  };
  template <typename T>
  using Table =
      ska::flat_hash_map<const c10::StorageImpl*, T, std::hash<const c10::StorageImpl*>,
                         std::equal_to<const c10::StorageImpl*>,
                         std::pmr::polymorphic_allocator<std::pair<const c10::StorageImpl*, T>>>;

  // A number among the arguments of a call, kept once however many calls have it.
  const at::Tensor& number(const at::Tensor& wrapped);
  bool is_parameter(const at::Tensor& tensor) const;
  bool is_buffer(const at::Tensor& tensor) const;
  Saved pass(Saving& saving, Kind kind, const char* reason);
  Saved hold(Saving& saving, Tracked& tracked, Kind kind, const char* reason);
  Saved keep_geometry(Saving& saving);
  // Holds it, and notes how it could be made again.
  Saved observe(Saving& saving, Tracked& tracked);
  Saved hold_part(Saving& saving, Tracked& tracked, const char* reason);
  std::optional<Saved> share(Saving& saving, Tracked& tracked);
  // By a recipe, from what is kept already or, where that is less, from what is kept instead.
  std::optional<Saved> derive(Saving& saving, Tracked& tracked);
  // How the tensor's memory could be made again by products, for the next plan.
  void note_remaking(const Saving& saving, const Tracked& tracked);
  // Sites whose packets the value would be made from if products made nothing again.
  void add_packets_instead(const Value& value, c10::SmallVectorImpl<Site*>& sites) const;
  // Who first saved what products made again and the value is made from.
  void add_products(const Value& value, c10::SmallVectorImpl<Site*>& sites) const;
  // Books what a packet of its own would have taken, `instead` bytes being kept in its place.
  void note_spared(const Saving& saving, Value& value, const Effort& effort, std::int64_t instead);
  // Tells the packets of the tensor's memory that signs are not all that is read of it.
  void tell_of_values(const Saving& saving, const Tracked& tracked);
  // What the tensor is a wider or longer copy of, if that is alive: it takes fewer bytes, and
  // others are made of it. Undefined where there is no such tensor.
  at::Tensor copied(const Tracked& tracked) const;
  // Packs that instead, and derives the tensor from it.
  std::optional<Saved> pack_copied(Saving& saving, Tracked& tracked);
  // Whether the values that a call made could be derived.
  bool is_derivable(const Saving& saving, const Tracked& tracked);
  // `copy` is the tensor without gaps, where the caller made it and the tensor has some.
  Saved pack(Saving& saving, Tracked& tracked, const Treatment& treatment, at::Tensor copy = {});
  // By the rule of the policy; none where its codec does not fit and need not.
  std::optional<Saved> encode(Saving& saving, Tracked& tracked, bool tanh);
  // store/leave.cpp. Whether what a site keeps leaves, and how.
  bool leaves(const Site& site) const;
  Passage passage_of(Site& site) const;
  // A reference may leave as soon as nothing else has its storage: looks at all of those that were
  // offered, or at a few, in turn.
  void offer(const std::shared_ptr<Hold>& hold, Site& site, const Tracked* home);
  void send_offered(std::size_t most);
  // The ledger of the step, with this save counted in it: once for each save.
  Ledger& book(Saving& saving);
  // Bytes that a save holds from now on, for the ledger and for what keeps them.
  Charge hold_bytes(Saving& saving, std::int64_t bytes);
  // Bytes that autograd alone would have kept for the save, and nothing for those before it.
  void charge_plain(Saved& saved, const Saving& saving, std::int64_t bytes);
  Saved saved(Saving& saving, View view, Saved::Kept kept, bool for_reader_only);

  // What a reader asks of the sources of a derived tensor.
  struct Need {
    bool exact = false;
    int bits = 0;                       // that a rounded source must have
    std::int64_t bytes = 0;             // of the reader
    std::int64_t instead = 0;           // bytes of memory that may be kept only for this
    std::optional<NormRows> rows = {};  // of a norm that will be applied
    bool products = false;              // may be run again for it
    // Where given, what other saves have derived counts as if it were stored, and is noted here by
    // who saved it first.
    std::vector<std::pair<Site*, std::int64_t>>* if_stored = nullptr;
    Site& reader;
  };
  Need need_of(const Saving& saving) const;
  // Whether it is stored so that larger ones can be derived. Where products may be run again, plans
  // count on what steps without them would keep.
  bool stored_for_others(const Tracked& tracked) const;
  // A tensor that could not be derived: whether it could, with less held, if smaller ones that it
  // is made of were stored instead of derived. Those are, from the next step on.
  void learn_cut(const Saving& saving, const Value& value, Need need);
  // What is known of the tensor's storage, from now on if nothing was; or null.
  Tracked& track(const at::Tensor& tensor);
  Tracked* known(const at::Tensor& tensor) const;
  Value& value_at(const at::Tensor& tensor);
  void add_input(std::pmr::vector<Value::Input>& inputs, const at::Tensor& tensor, int position);
  std::shared_ptr<Derived> derived(Value& value, const Need& need);
  std::optional<Source> source_of(const Value::Input& input, const Need& need, Effort& effort);
  std::optional<Source> kept_source(const Value::Input& input, const Need& need, Effort& effort);
  std::optional<Source> source_instead(const Value::Input& input, const Need& need, Effort& effort);
  std::vector<Source> sources_of(const Value& value, const Need& need, Effort& effort);
  // What tells where the result of ReLU or leaky ReLU is positive: bits of it, or of its argument.
  std::optional<Source> own_bits(const Value& value);

  const StoreOptions options_;
  const std::shared_ptr<SiteTable> sites_;
  Policy& policy_;
  const Offload offload_;
  const std::shared_ptr<Timeline> timeline_;
  struct Offered {
    std::weak_ptr<Hold> hold;
    Site* site = nullptr;
    const Tracked* home = nullptr;  // of its storage, if it is not a copy
  };
  std::deque<Offered> offered_;
  bool met_samples_ = false;
  std::shared_ptr<SharedPacket> waiting_;
  // Of the tables below, which are as large as those of the last block and go at once with the
  // store.
  const SpareMemory::Lent memory_;
  Table<Known> parameters_{memory_.get()};  // and buffers
  std::pmr::deque<Tracked> tracked_{memory_.get()};
  std::pmr::deque<Value> values_{memory_.get()};
  Table<Tracked*> storages_{memory_.get()};
  c10::SmallVector<at::Tensor, 8> numbers_;
  // By the storage of a parameter: its copies.
  ska::flat_hash_map<const c10::StorageImpl*, c10::SmallVector<Tracked*, 1>> copied_;
};

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_STORE_STORE_H_
