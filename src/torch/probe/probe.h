// SPDX-License-Identifier: Apache-2.0
//
// A probe: what folding each site would add to the gradient, measured without folding anything.
//
// Two passes of the same forward. In the first, with every leaf moved by epsilon * v for a random
// direction v, the inputs of each call that saves something foldable are noted and nothing else is
// kept. In the second, at the leaves' own values, saved tensors are kept as they are, and the
// difference of the noted inputs gives the tangent of each. In backward each node that reads a
// foldable tensor is run again with that tensor folded: the change of what it sends on, times the
// tangents there, is the error of the parameters' gradient along v. (effect.h has the local part,
// blocks.h the statistics, gains.h what stands in where a node cannot be run again.)
//
// A third kind of pass goes along with the user's own step, which it leaves alone, and gathers what
// needs no second forward.

#ifndef BACKFOLD_TORCH_PROBE_PROBE_H_
#define BACKFOLD_TORCH_PROBE_PROBE_H_

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <map>
#include <memory>
#include <mutex>
#include <unordered_set>
#include <vector>

#include "torch/capture/calls.h"
#include "torch/capture/site.h"
#include "torch/probe/gains.h"
#include "torch/probe/outside.h"
#include "torch/probe/rankings.h"
#include "torch/reads/demand.h"
#include "torch/store/saved.h"

namespace backfold::torch_layer {

class Probe;

// An input of a call, as the edge that its gradient leaves through.
struct ProbedInput {
  const torch::autograd::Node* function = nullptr;
  std::uint32_t number = 0;
  int slot = 0;
  at::Tensor tangent;  // undefined where it is not known
};

class Probed;

// A call that saved something foldable.
struct ProbedCall {
  const Operator* op = nullptr;
  bool closed_form = false;            // needs no tangents and no second run
  std::vector<c10::IValue> arguments;  // where a closed form looks at them
  std::vector<ProbedInput> inputs;
  std::vector<std::weak_ptr<Probed>> saved;  // owned by the graph
  std::vector<OutsideSaved> outside;         // in the user's own step
  // Of a norm: its input, until the statistics are there, and how it is normalised.
  std::optional<NormCall> norm;
  at::Tensor norm_input;
  Site* norm_site = nullptr;
  std::optional<Normalisation> by;
  const torch::autograd::Node* node = nullptr;
};

// Error energies of one tensor, for all calls that save it.
struct FoldedErrors {
  at::Tensor tensor;  // keeps the memory its own
  at::Tensor energies;
};

// A foldable tensor, kept as it is. It comes back folded while its node is run again.
class Probed : public Reader {
 public:
  Probed(std::weak_ptr<Probe> probe, std::shared_ptr<ProbedCall> call, Site& site,
         at::Tensor tensor, std::shared_ptr<FoldedErrors> errors)
      : probe_(std::move(probe)),
        call_(std::move(call)),
        site_(site),
        tensor_(std::move(tensor)),
        errors_(std::move(errors)) {}

  // For a call with a closed form: energies of the errors by width and row. Made once.
  const at::Tensor& error_energies();

  at::Tensor read() override;

  Site& site() const { return site_; }
  const at::Tensor& tensor() const { return tensor_; }
  // While its node is run again: how it comes back, none for as it is.
  void begin_again() { again_ = true; }
  void fold(at::Tensor folded) { folded_ = std::move(folded); }
  void end_again() {
    again_ = false;
    folded_.reset();
  }

 private:
  const std::weak_ptr<Probe> probe_;
  const std::shared_ptr<ProbedCall> call_;
  Site& site_;
  const at::Tensor tensor_;
  const std::shared_ptr<FoldedErrors> errors_;
  bool again_ = false;
  at::Tensor folded_;  // while it stands in
};

// The error of one site at some widths, still on its device.
struct Measurement {
  Site* site = nullptr;
  c10::SmallVector<int, 4> bits;
  Sensitivity::Estimate estimate = Sensitivity::Estimate::kNone;
  at::Tensor values;   // a norm for each width; or for one width numbers whose norm is meant
  bool summed = true;  // false in the latter case
  double factor = 1;   // of the norms
  const torch::autograd::Node* via = nullptr;   // times its signal gain, where given
  const torch::autograd::Node* into = nullptr;  // times its amplification, where given
};

class Probe : public std::enable_shared_from_this<Probe> {
 public:
  enum class Pass : std::uint8_t {
    kMoved,     // leaves are moved; backward must not run
    kClean,     // nothing is folded, effects are measured in backward
    kUsersOwn,  // the user's step: relative errors and signal gains only
    kFolded,    // one site is folded, to see the whole effect in the gradient
  };

  // `least` is the narrowest width to measure; nothing is known of narrower ones then. `noisy_at`,
  // where given, is the width of sites without a plan in a pass whose gradients carry noise.
  Probe(std::uint64_t seed, double epsilon, int least, std::optional<int> noisy_at = {})
      : seed_(seed),
        epsilon_(epsilon),
        least_(least),
        noisy_(noisy_at.has_value()),
        unplanned_(noisy_at.value_or(0)) {}

  void begin(Pass pass);
  Pass pass() const { return pass_; }

  // Of the layouts of each tensor, and of codecs of the menu.
  Rankings& rankings() { return rankings_; }

  // What an entry does with a tensor in a pass that is not the user's own.
  Saved save(const at::Tensor& tensor, Site& site, const Demand& demand, RunningCall& call,
             SitesAlive sites);
  // Beside the store, in the user's own step, outside of the model. What comes back is for the
  // saved tensor to ask; none where its node will not be run again. Where memory is short the
  // tensor is not measured: the step is the user's.
  std::shared_ptr<StandIn> note(const at::Tensor& tensor, Site& site, const Demand& demand,
                                RunningCall& call);
  // In the user's own step: the call of the model that will be run again has returned.
  void model_returned(const std::vector<ModelOutput>& outputs) { outside_.model_returned(outputs); }
  void call_begins(const RunningCall& call);
  void call_ended(const RunningCall& call, c10::ArrayRef<c10::IValue> results);

  // In passes of kind kFolded: the root of the site to fold, and how. None folds nothing.
  void fold_only(const Site* root, int bits, std::uint64_t draw);
  // Whether backward was begun in this pass, and whether there was anything to read in it.
  bool backward_began() const { return backward_began_; }
  bool saved_something() const { return saved_something_; }

  // Writes what was measured to the sites, times `scale`; returns how many have a new table.
  int finish(double scale);
  // The same for the user's own step. `rest` is the signal gain of nodes that this probe did not
  // see, `tangents` are those of what the model returned, `epsilon` times too large; none where its
  // call was not run again.
  int finish_own(double rest, const std::vector<at::Tensor>& tangents, double epsilon);

  // In passes of kind kFolded: a tensor of the site that is folded.
  at::Tensor folded(const at::Tensor& tensor, const Site& site,
                    const std::optional<Normalisation>& by);

  // For the nodes' hooks.
  void read_begins(const std::shared_ptr<ProbedCall>& call);
  void add(Measurement measurement);
  double epsilon() const { return epsilon_; }
  // The widths at which a site is measured.
  c10::SmallVector<int, 4> widths(const Site& site) const;
  Key next_key();
  // How a site's tensor would be packed, `bits` wide.
  GroupFormat format_of(const Site& site, const at::Tensor& tensor, int bits);
  void record_gains(const torch::autograd::Node& node, const std::vector<at::Tensor>& inputs,
                    const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& clean);
  // Whether gradients carry the noise of the widths there are, so that errors are measured as they
  // multiply each other: at few bits that is most of them.
  bool is_noisy() const { return noisy_; }
  int width_now(const Site& site) const;
  Outside& outside() { return outside_; }

 private:
  // Inputs of a call in the first pass.
  struct Moved {
    const Operator* op = nullptr;
    std::vector<std::pair<at::Tensor, std::uint32_t>> inputs;  // with their versions
  };
  // Relative errors of a tensor whose node is not run again.
  struct Relative {
    Site* site = nullptr;
    int bits = 0;
    std::shared_ptr<ProbedCall> call;
    at::Tensor norm, of_error;
  };

  std::shared_ptr<ProbedCall> call_record(RunningCall& call, Site& site);
  void note_moved(const RunningCall& call, Site& site);
  void take_tangents(const RunningCall& call, Site& site, ProbedCall& record);
  void rank(const at::Tensor& tensor, const Site& site, const ProbedCall& call);
  // Ranks once it is known how a norm normalises its input: now, or when its call has ended.
  void rank_norm(ProbedCall& call, c10::ArrayRef<c10::IValue> results);
  std::shared_ptr<FoldedErrors> errors_of(const at::Tensor& tensor, const Site& site);
  void add_relative_errors(const at::Tensor& tensor, Site& site,
                           const std::shared_ptr<ProbedCall>& call);
  bool watches_nodes() const;
  int write_tables(double scale);
  void watch(const at::Tensor& result, const std::shared_ptr<ProbedCall>& call);

  const std::uint64_t seed_;
  const double epsilon_;
  const int least_;
  const bool noisy_;
  const int unplanned_;
  Pass pass_ = Pass::kMoved;
  bool backward_began_ = false, saved_something_ = false;
  std::uint64_t draws_ = 0;
  std::map<std::pair<const Site*, int>, Moved> moved_;  // by site and how often it was seen
  std::map<const Site*, int> seen_;
  Rankings rankings_;
  std::vector<std::shared_ptr<ProbedCall>> calls_;
  // By storage and root; what has expired may be another tensor's.
  std::map<std::pair<const void*, const Site*>, std::weak_ptr<FoldedErrors>> folded_errors_;
  std::unordered_set<const torch::autograd::Node*> watched_;
  std::mutex mutex_;  // of what follows: hooks run on autograd's threads
  bool settled_ = false;
  const Site* only_ = nullptr;
  int only_bits_ = 0;
  std::uint64_t only_draw_ = 0;
  std::vector<Measurement> measurements_;
  std::vector<Relative> relatives_;
  Gains gains_;
  Outside outside_;
};

// Whether folding a tensor is a matter of choice, as far as the last steps of its site tell.
bool is_foldable(const at::Tensor& tensor, const Site& site, const Demand& demand);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PROBE_PROBE_H_
