// SPDX-License-Identifier: Apache-2.0
//
// A tensor that is made again when it is read: a recipe and what it needs.
//
// Sources are packets, references and other derived tensors, never autograd's nodes, so that
// everything goes when the graph goes. A reference may be to memory that autograd itself did not
// save, and that a correct program may overwrite: inside the block the store calls keep() before
// that happens, after it reading raises.

#ifndef BACKFOLD_TORCH_STORE_DERIVED_H_
#define BACKFOLD_TORCH_STORE_DERIVED_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <utility>
#include <variant>
#include <vector>

#include "torch/capture/calls.h"
#include "torch/capture/lap.h"
#include "torch/capture/site.h"
#include "torch/store/awaited.h"
#include "torch/store/geometry.h"
#include "torch/store/shared_packet.h"

namespace backfold::torch_layer {

class Derived;

// Where a derived tensor, or an argument of its recipe, comes from.
struct Source {
  std::variant<std::shared_ptr<SharedPacket>, std::shared_ptr<Hold>, std::shared_ptr<Derived>> kept;
  View view;  // in what is kept
  at::ScalarType type = at::kFloat;
  Counter counter;   // of memory that is held by reference
  int position = 0;  // among the arguments; past them, results of the first call in order

  at::Tensor get() const;
};

// What it takes to make a tensor again.
struct Effort {
  struct Leaf {
    std::int64_t bytes = 0;
    bool instead = false;        // memory that nobody else keeps
    const Site* site = nullptr;  // that saved it, if any
    std::int64_t packed = 0;     // bytes of its packet; 0 for a reference
  };
  c10::SmallVector<const Operator*, 4> operators;  // the last one first
  std::int64_t bytes_moved = 0;
  c10::SmallVector<std::pair<const void*, Leaf>, 3> leaves;  // packets and references, each once
  bool rounded = false;                                      // some leaf is
  bool one_pass = true;                                      // as far as the operators tell
  int bits = 16;                                             // the fewest of a rounded one
  int products = 0;                                          // among the operators
  bool of_products = false;                                  // some leaf is made by products
  c10::SmallVector<std::shared_ptr<Lap>, 2> laps;            // of those, where they are timed
  // Bytes that are allocated at most while its operators run one after the other, the result
  // included, and of the largest tensor among those.
  std::int64_t peak = 0, largest = 0;

  // Adds one that is not there yet.
  void add_leaf(const void* kept, const Leaf& leaf);

  // Bytes of memory that nobody else keeps.
  std::int64_t instead() const;
  // Bytes that making a result of so many moves: in one pass, packets are read and it is written.
  std::int64_t moved_for(std::int64_t result) const;
  // Bytes that are allocated beyond the result while it is made.
  std::int64_t transient_for(std::int64_t result) const;
  void add(const Effort& other);
};

// What decides which kernel an operator runs. Chunks of CPU kernels, and so the last bits of some
// results, depend on the number of threads.
struct RunFlags {
  int threads = 1;
  bool mkldnn = true, cudnn = true, deterministic_cudnn = false, deterministic = false;

  static RunFlags now();
  void set() const;
  bool operator==(const RunFlags&) const = default;
};

// What is allocated for a source: to make it, at most; as long as it is there; and for the largest
// tensor on the way.
struct Allocated {
  std::int64_t peak = 0, bytes = 0, largest = 0;
};
Allocated allocated_for(const Source& source);

// Positions of sources in the order in which making them takes least memory: first what needs most
// beside itself.
c10::SmallVector<std::size_t, 4> by_what_they_take(c10::ArrayRef<Source> sources);

class Derived {
 public:
  struct Making {
    const Operator* op = nullptr;
    std::vector<c10::IValue> arguments;  // without tensors that are sources
    std::vector<Source> sources;
    std::optional<Source> bits;  // of ReLU's own
    View view;                   // of the result
    at::ScalarType type = at::kFloat;
    at::Device device = at::kCPU;
  };
  // `site` is whose save asked for it first.
  Derived(Making making, Effort effort, const Site& site);
  ~Derived();
  Derived(const Derived&) = delete;
  Derived& operator=(const Derived&) = delete;

  // What references among its sources take of the memory that is held.
  void charge(Charge charge) { charge_ = std::move(charge); }

  // The result is saved itself: its memory serves while it is alive, and a reader is expected.
  void save(const c10::Storage& storage);

  // The tensor of that view: the result's own memory where it is still alive, else made again. With
  // `share`, it may be that of another reader.
  at::Tensor restore(const View& view, bool share);
  // The memory of the result, made again.
  c10::Storage make();
  // What it would be if references among its sources held other values: those that `other` gives
  // for a view of one, where it gives any. None where that changes nothing.
  using Other = std::function<at::Tensor(const Hold& hold, const View& view)>;
  std::optional<at::Tensor> with(const Other& other);
  // References among its sources, and those of its sources, each once.
  std::vector<const Hold*> references() const;
  // A source is about to change: from now on the result is held.
  void keep();
  // The memory of the result is about to change.
  void forget_original();

  const Effort& effort() const { return effort_; }
  std::int64_t bytes() const { return bytes_of(making_.view, making_.type); }
  // The sites whose packets it is made from, each once.
  const std::vector<Site*>& roots() const { return roots_; }

 private:
  // Recipes as one kernel runs them: what is done to the values of which packet.
  struct OnePass {
    struct Planned {
      Step step;
      std::optional<Source> operand;
      const Derived* maker = nullptr;  // whose source the operand is
      bool spread = false;             // over more elements than it has
      at::Tensor mask;
    };
    std::shared_ptr<SharedPacket> packet;
    const void* start = nullptr;  // whose values the steps begin with: the packet's, or a norm's
    Finish finish;                // without its steps
    std::vector<Planned> steps;
    bool starts_again = false;  // a later step begins with them once more
    bool keeps_other = false;   // the second slot is taken

    bool add(const Step& step);
    bool start_again();
    bool begins_with(const Source& source) const;
  };

  // What with() has made so far of it and its sources.
  using Changed = std::map<const Derived*, std::optional<at::Tensor>>;
  std::optional<at::Tensor> with(const Other& other, Changed& changed);
  using Seen = std::set<const Derived*>;
  void references(std::vector<const Hold*>& all, Seen& seen) const;

  c10::Storage shared(bool share);
  c10::Storage run() const;  // with mutex_ held
  // A source, or an error where the memory that it refers to is not what it was.
  at::Tensor checked(const Source& source) const;
  // store/one_pass.cpp. Adds this recipe, and those below it, to a pass; false where they do not
  // fit.
  bool join(OnePass& pass);
  bool add_to(OnePass& pass) const;
  bool add_norm(OnePass& pass) const;
  bool add_mask(OnePass& pass) const;
  bool add_pair(Step::Kind kind, double of_self, double of_other, OnePass& pass) const;
  bool add_branch(const Source& source, Step step, OnePass& pass) const;
  bool add_operand(const Source& source, Step step, OnePass& pass) const;
  bool follow(const Source& source, OnePass& pass) const;
  bool in_same_order(const View& view) const;
  std::optional<c10::Storage> run_in_one_pass() const;

  // Whoever is made from it counts, while a product is not read itself.
  void expect_user();

  Making making_;
  const Effort effort_;
  const std::vector<Site*> roots_;
  const Site& site_;
  const RunFlags flags_;
  std::optional<WeakStorage> original_;
  std::size_t original_bytes_ = 0;
  std::mutex mutex_;
  DecodedOnce made_;
  Awaited awaited_;  // has a lock of its own
  mutable bool ran_ = false;
  std::optional<c10::Storage> kept_;
  std::optional<c10::Stream> kept_on_;
  Charge charge_;
};

// The result of a recipe on these sources. `rounded`: some of them are.
at::Tensor run_again(const Derived::Making& making, c10::ArrayRef<at::Tensor> sources,
                     const at::Tensor& bits, bool rounded);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_STORE_DERIVED_H_
