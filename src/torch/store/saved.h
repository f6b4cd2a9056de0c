// SPDX-License-Identifier: Apache-2.0
//
// One tensor that one node saved: what autograd holds in its place, and how it comes back.

#ifndef BACKFOLD_TORCH_STORE_SAVED_H_
#define BACKFOLD_TORCH_STORE_SAVED_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <variant>

#include "torch/store/derived.h"
#include "torch/store/shared_packet.h"

namespace backfold::torch_layer {

// Keeps the sites alive for as long as anything saved at one of them.
using SitesAlive = std::shared_ptr<const SiteTable>;

// Something that is asked for the tensor whenever it is read.
class Reader {
 public:
  virtual ~Reader() = default;
  virtual at::Tensor read() = 0;
};

// What a saved tensor comes back as while its node is run again in the user's own backward; the
// tensor as it is kept where nothing stands in.
struct StandIn {
  at::Tensor tensor;
};

// While one lives, nodes of this thread are run again: whoever reads is meant to.
class RunningAgain {
 public:
  RunningAgain();
  ~RunningAgain();
  RunningAgain(const RunningAgain&) = delete;
  RunningAgain& operator=(const RunningAgain&) = delete;
};

// The node that saves a tensor, told without a pointer to it: it was made on the saving thread, and
// no other since. Where another was, as inside some operators, none is found.
struct SavingNode {
  std::uint64_t number = 0, thread = 0;

  static SavingNode newest();
  // Whether the node itself is what runs now, is one of torch's own, and will be let go after it.
  // Such a node reads each of its tensors once. One with hooks is never found: they run as it does,
  // before and after it, and may read what it saved.
  bool reads_for_the_last_time() const;
};

class Saved {
 public:
  // A reference, geometry, one of the objects that readers share, or a probe's.
  using Kept = std::variant<at::Tensor, at::Device, std::shared_ptr<Hold>,
                            std::shared_ptr<SharedPacket>, std::shared_ptr<ParameterCopy>,
                            std::shared_ptr<Derived>, std::shared_ptr<Reader>>;

  // `view` is where the tensor lies in what is kept. `rule` is given where the values that come
  // back are made for the nodes that it names, and for no other reader.
  Saved(const at::Tensor& tensor, const Site& site, SitesAlive sites, View view, Kept kept,
        const Rule* rule);

  // The tensor, as its backward node may see it. May be called again, from any thread. Where its
  // node reads it for the last time, a packet is let go at once, not after the node's work: the
  // peak is lower by one packet. Whoever asks during that work is given what the node was.
  at::Tensor unpack();

  // What autograd alone would keep of the same storage, and what is held beside the objects that
  // readers share.
  void charge(std::shared_ptr<const Charge> plain) { plain_ = std::move(plain); }
  void charge(Charge held) { held_ = std::move(held); }

  // From now on something may stand in, and nothing is let go before its node is.
  void stand_in(std::shared_ptr<StandIn> stand_in) { stand_in_ = std::move(stand_in); }

 private:
  // What the node was given, while it has it.
  struct Given {
    Given(WeakStorage storage, View view) : storage(std::move(storage)), view(std::move(view)) {}
    WeakStorage storage;
    View view;
  };

  void check_unmodified() const;
  void check_reader() const;

  const Site& site_;
  const SitesAlive sites_;
  const Counter counter_;
  const at::ScalarType type_;
  const SavingNode node_ = SavingNode::newest();
  const View view_;
  Kept kept_;
  std::optional<Given> given_;  // once a packet was let go
  const Rule* const rule_;
  std::shared_ptr<StandIn> stand_in_;
  std::shared_ptr<const Charge> plain_;
  Charge held_;
};

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_STORE_SAVED_H_
