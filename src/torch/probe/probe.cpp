// SPDX-License-Identifier: Apache-2.0

#include "torch/probe/probe.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <set>

#include "torch/probe/closed_form.h"
#include "torch/probe/effect.h"
#include "torch/store/geometry.h"
#include "torch/store/treatment.h"
#include "torch/store/width.h"

namespace backfold::torch_layer {
namespace {

bool is_zero_exact(const Site& site) { return root_of(site).zero_exact; }

at::Tensor without_history(const at::Tensor& tensor) {
  return tensor.is_leaf() ? tensor : tensor.tensor_data();
}

}  // namespace

c10::SmallVector<int, 4> Probe::widths(const Site& site, const Site& root) const {
  if (site.starts) return Starts::widths_of(root.reference);
  // A floor of 6 marks tensors whose noise a formula amplifies, one of 16 those where it may do so
  // without bounds. How much it does here is measured, from 4 bits on. A floor of 8 marks tensors
  // of unknown sensitivity.
  const int floor = site.floor == 8 ? site.floor : std::min(site.floor, 4);
  const int least = std::max({least_, floor, root.zero_exact ? 2 : 1});
  c10::SmallVector<int, 4> widths;
  for (const int width : {1, 2, 4})
    if (width >= least) widths.push_back(width);
  if (site.floor > 4) widths.push_back(site.floor <= 6 ? 6 : 8);
  const auto& choice = root.choice;
  if (choice && choice->bits >= 8 && widths.back() < 8) widths.push_back(8);
  return widths;
}

bool is_foldable(const at::Tensor& tensor, const Site& site, const Demand& demand) {
  if (obstacle_in(tensor) || tensor.numel() == 0) return false;
  if (site.alive || root_of(site).alive || site.decides) return false;
  if (demand.reads != Reads::kValues && demand.reads != Reads::kFinely &&
      demand.reads != Reads::kStart)
    return false;
  return root_of(site).reference.elements > 0;
}

int Probe::width_now(const Site& site) const {
  return noise_width(site, root_of(site), is_zero_exact(site), unplanned_);
}

std::shared_ptr<FoldedErrors> Probe::errors_of(const at::Tensor& tensor, const Site& site,
                                               const Site* root) {
  auto& known = folded_errors_[{tensor.storage().unsafeGetStorageImpl(), root}];
  auto errors = known.lock();
  // Another view of the storage, or another shape of energies, needs errors of its own.
  if (!errors || !same_elements(errors->tensor, tensor) || site.op->name == "aten::convolution") {
    errors = std::make_shared<FoldedErrors>();
    errors->tensor = tensor.tensor_data();
    known = errors;
  }
  return errors;
}

void Probe::begin(Pass pass, int bits) {
  pass_ = pass;
  start_bits_ = bits;
  if (pass == Pass::kMoved) starts_->begin(Starts::Pass::kMoved, 0);
  if (pass == Pass::kClean) starts_->begin(Starts::Pass::kClean, 0);
  if (pass == Pass::kStarts) starts_->begin(Starts::Pass::kFolded, bits);
  if (noisy_) gains_.want();
  backward_began_ = false;
  tangents_.begin();
  if (pass == Pass::kFolded) calls_.clear();
}

Key Probe::next_key() {
  const std::lock_guard lock(mutex_);
  return {seed_ ^ 0x70726f6265ULL, draws_++};
}

GroupFormat Probe::format_of(const Site& site, const at::Tensor& tensor, int bits) {
  Choice choice{bits, {}};
  {
    const std::lock_guard lock(mutex_);
    choice.grouping = rankings_.best(root_of(site));
  }
  return format_with(site, tensor, choice);
}

std::shared_ptr<ProbedCall> Probe::call_record(RunningCall& call, Site& site) {
  if (call.note >= 0) return calls_[static_cast<std::size_t>(call.note)];
  auto record = std::make_shared<ProbedCall>();
  record->op = call.op;
  if (pass_ == Pass::kClean) {
    // In the user's own step, arguments are not kept: they would stay alive until backward.
    record->closed_form = has_closed_form(call, site);
    if (record->closed_form) {
      record->arguments = call.arguments;
    } else {
      record->inputs = tangents_.take(call, site);
      const bool all_known = std::all_of(record->inputs.begin(), record->inputs.end(),
                                         [](const auto& one) { return one.tangent.defined(); });
      if (!all_known) gains_.want();
    }
  }
  call.note = static_cast<std::int64_t>(calls_.size());
  calls_.push_back(record);
  return record;
}

void Probe::rank(const at::Tensor& tensor, const Site& site, const ProbedCall& call) {
  rankings_.rank(
      tensor, site, std::max(2, widths(site, root_of(site))[0]), [this] { return next_key(); },
      call.by);
}

void Probe::rank_norm(ProbedCall& call, c10::ArrayRef<c10::IValue> results) {
  const at::Tensor input = std::exchange(call.norm_input, at::Tensor());
  const at::Tensor dense = input.is_non_overlapping_and_dense() ? input : without_gaps(input);
  if (const auto rows = rows_of(*call.norm, dense)) {
    call.by = call.norm->has_statistics() ? normalisation_of(*call.norm, *rows, results)
                                          : std::optional(scale_of(*rows, dense));
  }
  rank(input, *call.norm_site, call);
}

void Probe::add_relative_errors(const at::Tensor& tensor, Site& site,
                                const std::shared_ptr<ProbedCall>& call) {
  gains_.want();
  const at::Tensor norm = norm_of(tensor.tensor_data());
  std::vector<RelativeError> all;  // added only if every width was measured
  for (const int bits : widths(site, root_of(site))) {
    const GroupFormat format = format_with(site, tensor, {bits, {}});
    all.push_back({&site, bits, call, norm,
                   norm_of(difference(round_trip(tensor, format, next_key()), tensor))});
  }
  measurements_.add(all);
}

std::shared_ptr<Reader> Probe::keep_start(const at::Tensor& tensor, Site& site) {
  const auto number = starts_->add(tensor, site);
  if (pass_ == Pass::kMoved) return std::make_shared<NotKept>(weak_from_this());
  if (!number) return std::make_shared<Watched>(weak_from_this(), without_history(tensor), nullptr);
  if (pass_ == Pass::kClean)
    rankings_.rank(
        tensor, site, widths(site, root_of(site))[0], [this] { return next_key(); }, std::nullopt);
  return std::make_shared<StartedFrom>(weak_from_this(), site, without_history(tensor), *number);
}

at::Tensor Probe::start_folded(const Site& site, const at::Tensor& tensor) {
  if (start_bits_ == 0 || start_bits_ >= 8 * static_cast<int>(tensor.element_size())) return tensor;
  // One packet serves all that start from it.
  const Key key{seed_ + static_cast<std::uint64_t>(start_bits_), root_of(site).hash};
  return round_trip(tensor, format_of(site, tensor, start_bits_), key);
}

Saved Probe::save(const at::Tensor& tensor, Site& site, const Demand& demand, RunningCall& call,
                  SitesAlive sites, Store& store) {
  const at::AutoGradMode no_grad(false);
  saved_something_ = true;
  const bool foldable = is_foldable(tensor, site, demand);
  std::shared_ptr<Reader> kept;
  if (foldable && demand.reads == Reads::kStart && pass_ != Pass::kFolded) {
    kept = keep_start(tensor, site);
  } else if (pass_ == Pass::kStarts) {
    kept = std::make_shared<Watched>(weak_from_this(), without_history(tensor), nullptr);
  } else if (pass_ == Pass::kMoved) {
    if (foldable && call.note < 0) {
      if (!has_closed_form(call, site)) tangents_.note(call, site);
      call.note = 0;
    }
    kept = std::make_shared<NotKept>(weak_from_this());
  } else if (foldable) {
    const auto record = call_record(call, site);
    record->shares_along = demand.shares_along;
    const Comeback comeback = comeback_of(tensor, site, record, store);
    if (comeback.derived && !site.packs_copied) {
      // Ranked where it is packed.
    } else if (demand.norm && !demand.norm->norm->until_planned) {
      record->norm = demand.norm;
      record->norm_input = tensor.tensor_data();
      record->norm_site = &site;
      if (!demand.norm->has_statistics()) rank_norm(*record, {});
    } else {
      rank(tensor, site, *record);
    }
    if (pass_ == Pass::kFolded) {
      return Saved(tensor, site, std::move(sites), {},
                   std::make_shared<FoldedLater>(weak_from_this(), comeback), nullptr);
    }
    if (!can_run_again(*call.op)) add_relative_errors(tensor, site, record);
    std::vector<std::shared_ptr<FoldedErrors>> errors;
    if (record->closed_form)
      for (const Site* root : comeback.roots()) errors.push_back(errors_of(tensor, site, root));
    auto probed = std::make_shared<Probed>(weak_from_this(), record, site, comeback, errors);
    record->saved.push_back(probed);
    kept = std::move(probed);
  } else {
    // What is not derived may be what others are derived from.
    kept = std::make_shared<Watched>(weak_from_this(), without_history(tensor),
                                     site.derived ? nullptr : store.refer_to(tensor));
  }
  return Saved(tensor, site, std::move(sites), {}, std::move(kept), nullptr);
}

void Probe::fold_only(const Site* root, int bits, std::uint64_t draw) {
  only_ = root;
  only_bits_ = bits;
  only_draw_ = draw;
}

std::shared_ptr<StandIn> Probe::note(const at::Tensor& tensor, Site& site, const Demand& demand,
                                     RunningCall& call) {
  const bool again = outside_.expects_model() && can_run_again(*call.op);
  const auto stand_in = again ? std::make_shared<StandIn>() : nullptr;
  // What a checkpoint starts again from cannot be measured without running it again.
  if (!is_foldable(tensor, site, demand) || demand.reads == Reads::kStart) return stand_in;
  const at::AutoGradMode no_grad(false);
  try {
    const auto record = call_record(call, site);
    add_relative_errors(tensor, site, record);
    if (!again) return stand_in;
    // A tensor that a call saves twice has one packet, so one copy.
    const auto same = std::find_if(
        record->outside.begin(), record->outside.end(),
        [&](const OutsideSaved& one) { return one.source == tensor.unsafeGetTensorImpl(); });
    record->outside.push_back({&site, tensor.unsafeGetTensorImpl(),
                               same == record->outside.end()
                                   ? tensor.tensor_data().clone(at::MemoryFormat::Preserve)
                                   : same->tensor,
                               stand_in, demand.shares_along});
  } catch (const c10::Error& error) {
    TORCH_WARN_ONCE("backfold: could not measure the effect of folding the tensors saved by ",
                    call.op->name, ": ", error.what_without_backtrace());
  }
  return stand_in;
}

void Probe::watch(const at::Tensor& result, const std::shared_ptr<ProbedCall>& call) {
  if (!result.defined()) return;
  const auto& node = result.grad_fn();
  if (!node || !watched_.insert(node.get()).second) return;
  if (call && !call->node) call->node = node.get();
  node->add_post_hook(std::make_unique<EffectHook>(weak_from_this(), *node, call));
}

bool Probe::watches_nodes() const {
  return at::GradMode::is_enabled() && (pass_ == Pass::kClean || pass_ == Pass::kUsersOwn);
}

void Probe::call_begins(const RunningCall& call) {
  if (!watches_nodes()) return;
  // Nodes of Python functions are seen only when a later call takes their results.
  for (const auto& [argument, position] : call.tensors)
    watch(at::Tensor(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(argument)), nullptr);
}

void Probe::call_ended(const RunningCall& call, c10::ArrayRef<c10::IValue> results) {
  const auto record = call.note >= 0 && pass_ != Pass::kMoved
                          ? calls_[static_cast<std::size_t>(call.note)]
                          : std::shared_ptr<ProbedCall>();
  if (record && record->norm_input.defined()) {
    const at::AutoGradMode no_grad(false);
    rank_norm(*record, results);
  }
  if (!watches_nodes()) return;
  for (const c10::IValue& result : results) {
    if (result.isTensor()) {
      outside_.add_node(result.toTensor());
      watch(result.toTensor(), record);
    } else if (result.isTensorList()) {
      for (const at::Tensor& one : result.toTensorVector()) {
        outside_.add_node(one);
        watch(one, record);
      }
    }
  }
}

void Probe::read_begins(const std::shared_ptr<ProbedCall>& call) {
  const std::lock_guard lock(mutex_);
  backward_began_ = true;
  if (call && !call->node)
    if (const auto node = torch::autograd::get_current_node()) call->node = node.get();
  if (pass_ == Pass::kClean && !std::exchange(settled_, true)) rankings_.settle();
}

void Probe::add(Measurement measurement) {
  const std::lock_guard lock(mutex_);
  measurements_.add(std::move(measurement));
}

void Probe::record_gains(const torch::autograd::Node& node, const std::vector<at::Tensor>& inputs,
                         const std::vector<at::Tensor>& outputs,
                         const std::vector<at::Tensor>& clean) {
  if (!gains_.wanted()) return;
  const std::lock_guard lock(mutex_);
  backward_began_ = true;
  gains_.record(node, inputs, outputs, clean);
}

int Probe::finish_own(double rest, const std::vector<at::Tensor>& tangents, double epsilon,
                      const LeafWeights& weights) {
  std::set<const Site*> measured;
  for (Outside::Energy& one : outside_.finish(tangents, epsilon, weights)) {
    measured.insert(one.site);
    measurements_.add({one.site,
                       {one.bits},
                       Sensitivity::Estimate::kRerun,
                       std::move(one.norm),
                       true,
                       one.factor});
  }
  measurements_.drop_relative(measured);
  gains_.settle(rest, weights);
  return measurements_.write_tables(gains_, rankings_, 1) + graphs_->write_tables();
}

int Probe::finish(double scale) {
  for (Measurement& one : starts_->take()) measurements_.add(std::move(one));
  gains_.settle(0, weights_);
  return measurements_.write_tables(gains_, rankings_, scale);
}

}  // namespace backfold::torch_layer
