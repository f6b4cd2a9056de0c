// SPDX-License-Identifier: Apache-2.0
//
// A probe: what folding each site would add to the gradient, measured without folding anything.
//
// It takes two passes of the same forward. The first, with every leaf moved by epsilon * v for a
// random direction v, keeps only the inputs of each call that saves something foldable. The second,
// at the leaves' own values, keeps saved tensors unfolded, and the difference of the inputs gives
// their tangents. In backward, each node that reads a foldable tensor is run again with that tensor
// folded: the change in its output times the tangents there is the error of the parameters'
// gradient along v. (effect.h has the local part, blocks.h the statistics, tangents.h the inputs,
// gains.h the substitute for nodes that cannot be run again, measurements.h the resulting tables.)
//
// What checkpoints start again from takes passes of its own (starts.h).
//
// A third kind of pass accompanies the user's own step without changing it, and gathers everything
// that needs no second forward.

#ifndef BACKFOLD_TORCH_PROBE_PROBE_H_
#define BACKFOLD_TORCH_PROBE_PROBE_H_

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "torch/capture/calls.h"
#include "torch/capture/site.h"
#include "torch/probe/gains.h"
#include "torch/probe/graphs.h"
#include "torch/probe/leaf_weights.h"
#include "torch/probe/measurements.h"
#include "torch/probe/outside.h"
#include "torch/probe/probed.h"
#include "torch/probe/rankings.h"
#include "torch/probe/starts.h"
#include "torch/probe/tangents.h"
#include "torch/reads/demand.h"
#include "torch/store/saved.h"
#include "torch/store/store.h"

namespace backfold::torch_layer {

class Probe : public std::enable_shared_from_this<Probe> {
 public:
  enum class Pass : std::uint8_t {
    kMoved,     // leaves are moved; backward must not run
    kClean,     // nothing is folded; effects are measured in backward
    kUsersOwn,  // the user's step: relative errors and signal gains only
    kFolded,    // one site is folded, to see its whole effect on the gradient
    kStarts,    // checkpoints start again from folded tensors, and nothing else is folded
  };

  // `least` is the narrowest width to measure; narrower ones stay unknown. `weights` say how errors
  // count. `noisy_at`, if given, makes gradients carry noise, and is the width of sites without a
  // plan.
  Probe(std::uint64_t seed, double epsilon, int least, LeafWeights weights = {},
        std::optional<int> noisy_at = {})
      : seed_(seed),
        epsilon_(epsilon),
        least_(least),
        weights_(std::move(weights)),
        noisy_(noisy_at.has_value()),
        unplanned_(noisy_at.value_or(0)),
        starts_(std::make_shared<Starts>(epsilon, weights_)),
        graphs_(std::make_shared<GraphRuns>(seed, least)) {}

  // `bits` is the width of a pass of kind kStarts.
  void begin(Pass pass, int bits = 0);
  Pass pass() const { return pass_; }

  // Rankings of layouts, and of the menu's codecs, for each tensor.
  Rankings& rankings() { return rankings_; }
  // What checkpoints start again from.
  Starts& starts() { return *starts_; }
  // Compiled graphs, in the user's own step.
  const std::shared_ptr<GraphRuns>& graphs() { return graphs_; }

  // Saves a tensor in a pass that is not the user's own.
  Saved save(const at::Tensor& tensor, Site& site, const Demand& demand, RunningCall& call,
             SitesAlive sites, Store& store);
  // Notes a tensor that the store saves in the user's own step, outside of the model. The saved
  // tensor reads from the stand-in returned, which is null if its node will not be run again. If
  // memory runs out, the tensor is left unmeasured, for the user's step must not fail.
  std::shared_ptr<StandIn> note(const at::Tensor& tensor, Site& site, const Demand& demand,
                                RunningCall& call);
  // In the user's own step: the call of the model that will be run again has returned.
  void model_returned(const std::vector<ModelOutput>& outputs) { outside_.model_returned(outputs); }
  void call_begins(const RunningCall& call);
  void call_ended(const RunningCall& call, c10::ArrayRef<c10::IValue> results);

  // In passes of kind kFolded: the root of the site to fold, and how. Null folds nothing.
  void fold_only(const Site* root, int bits, std::uint64_t draw);
  // Whether backward began in this pass, and whether anything was saved for it.
  bool backward_began() const { return backward_began_ || graphs_->began(); }
  bool saved_something() const { return saved_something_; }

  // Writes the measured errors, times `scale`, to the sites. Returns the number of sites measured.
  int finish(double scale);
  // The same for the user's own step. `rest` is the signal gain of nodes that this probe did not
  // see. `tangents` are those of the model's outputs, `epsilon` times too large; empty if its call
  // was not run again. `weights` say how errors count.
  int finish_own(double rest, const std::vector<at::Tensor>& tangents, double epsilon,
                 const LeafWeights& weights);

  // In passes of kind kFolded: a tensor with the one site's packet folded.
  at::Tensor folded_only(const Comeback& comeback);
  // In passes of kind kStarts: what a checkpoint starts again from. In other passes, the tensor.
  at::Tensor start_folded(const Site& site, const at::Tensor& tensor);
  // What a packet would hold, as it comes back.
  at::Tensor folded(const Leaf& leaf, int bits, const Key& key);

  // For readers and the nodes' hooks.
  void read_begins(const std::shared_ptr<ProbedCall>& call);
  void add(Measurement measurement);
  double epsilon() const { return epsilon_; }
  const LeafWeights& weights() const { return weights_; }
  // The widths at which a site is measured, for the packet of a root.
  c10::SmallVector<int, 4> widths(const Site& site, const Site& root) const;
  Key next_key();
  // The format that a site's tensor would be packed in at `bits` bits.
  GroupFormat format_of(const Site& site, const at::Tensor& tensor, int bits);
  void record_gains(const torch::autograd::Node& node, const std::vector<at::Tensor>& inputs,
                    const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& clean);
  // Whether gradients carry the noise of the current widths, so that measured errors include how
  // they multiply each other. At few bits that is most of the error.
  bool is_noisy() const { return noisy_; }
  int width_now(const Site& site) const;
  Outside& outside() { return outside_; }

 private:
  // The same as save() for what a checkpoint starts again from.
  std::shared_ptr<Reader> keep_start(const at::Tensor& tensor, Site& site);
  std::shared_ptr<ProbedCall> call_record(RunningCall& call, Site& site);
  void rank(const at::Tensor& tensor, const Site& site, const ProbedCall& call);
  // Ranks the input of a norm, once it is known how the norm normalises it.
  void rank_norm(ProbedCall& call, c10::ArrayRef<c10::IValue> results);
  Comeback comeback_of(const at::Tensor& tensor, Site& site,
                       const std::shared_ptr<ProbedCall>& call, Store& store);
  std::shared_ptr<FoldedErrors> errors_of(const at::Tensor& tensor, const Site& site,
                                          const Site* root);
  void add_relative_errors(const at::Tensor& tensor, Site& site,
                           const std::shared_ptr<ProbedCall>& call);
  bool watches_nodes() const;
  void watch(const at::Tensor& result, const std::shared_ptr<ProbedCall>& call);

  const std::uint64_t seed_;
  const double epsilon_;
  const int least_;
  const LeafWeights weights_;
  const bool noisy_;
  const int unplanned_;
  const std::shared_ptr<Starts> starts_;
  const std::shared_ptr<GraphRuns> graphs_;
  Pass pass_ = Pass::kMoved;
  int start_bits_ = 0;
  bool backward_began_ = false, saved_something_ = false;
  std::uint64_t draws_ = 0;
  Tangents tangents_;
  Rankings rankings_;
  std::vector<std::shared_ptr<ProbedCall>> calls_;
  std::unordered_map<const Hold*, std::weak_ptr<Leaf>> leaves_;
  // By storage and root. An expired entry may have been another tensor's.
  std::map<std::pair<const void*, const Site*>, std::weak_ptr<FoldedErrors>> folded_errors_;
  std::unordered_set<const torch::autograd::Node*> watched_;
  std::mutex mutex_;  // guards what follows: hooks run on autograd's threads
  bool settled_ = false;
  const Site* only_ = nullptr;
  int only_bits_ = 0;
  std::uint64_t only_draw_ = 0;
  Measurements measurements_;
  Gains gains_;
  Outside outside_;
};

// Whether a tensor can be folded, judging by the last steps of its site.
bool is_foldable(const at::Tensor& tensor, const Site& site, const Demand& demand);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PROBE_PROBE_H_
