// SPDX-License-Identifier: Apache-2.0

#include "torch/store/store.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <atomic>

#include "torch/store/saving.h"
#include "torch/store/small_objects.h"

namespace backfold::torch_layer {
namespace {

std::atomic<ParameterTest> is_parameter_by_class{nullptr};

// References that each save looks at, to see whether they can leave. Most leave at the next save;
// a few wait for as long as the program has them.
constexpr std::size_t kOfferedLookedAt = 8;

}  // namespace

void recognise_parameters_by(ParameterTest test) { is_parameter_by_class = test; }

Store::Store(const StoreOptions& options, std::shared_ptr<SiteTable> sites, Policy& policy,
             const std::vector<Parameter>& parameters, SpareMemory& memory, Offload offload,
             std::shared_ptr<Timeline> timeline)
    : options_(options),
      sites_(std::move(sites)),
      policy_(policy),
      offload_(std::move(offload)),
      timeline_(std::move(timeline)),
      memory_(memory) {
  parameters_.reserve(parameters.size());
  storages_.reserve(sites_->sites().size() + parameters.size());
  for (const Parameter& parameter : parameters)
    if (parameter.tensor.has_storage())
      parameters_.emplace(parameter.tensor.storage().unsafeGetStorageImpl(),
                          Known{parameter.landmark, parameter.buffer});
}

std::uint32_t Store::landmark_of(const at::Tensor& tensor) const {
  if (!tensor.has_storage()) return 0;
  const c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  if (const auto found = parameters_.find(storage); found != parameters_.end())
    return found->second.landmark;
  if (const Tracked* tracked = known(tensor)) return tracked->copy_landmark;
  // Without a model, and if it is sharded, parameters are known by what they are.
  const bool nameless = parameters_.empty() || options_.sharded;
  return nameless && is_parameter(tensor) ? sites_->nameless_landmark(storage) : 0;
}

bool Store::is_parameter(const at::Tensor& tensor) const {
  if (tensor.is_leaf() && tensor.requires_grad()) return true;
  if (tensor.has_storage() && parameters_.count(tensor.storage().unsafeGetStorageImpl()))
    return true;
  if (options_.sharded)
    if (const ParameterTest test = is_parameter_by_class; test && test(tensor)) return true;
  if (!tensor.is_view()) return false;
  const at::TensorBase& base = tensor._base();
  return base.is_leaf() && base.requires_grad();
}

bool Store::is_buffer(const at::Tensor& tensor) const {
  const auto found = parameters_.find(tensor.storage().unsafeGetStorageImpl());
  return found != parameters_.end() && found->second.buffer;
}

Key Store::next_key(Site& site, std::int64_t step) const {
  if (site.draws_step != step) {
    site.draws_step = step;
    site.draws = 0;
  }
  const std::uint64_t draw = site.draws++;
  return {options_.seed,
          scramble(site.hash ^ scramble(static_cast<std::uint64_t>(step) << 20 ^ draw)),
          options_.turn};
}

Ledger& ledger_of(Site& site, std::int64_t step) {
  Ledger& ledger = site.ledger;
  if (ledger.step != step) {
    ledger = Ledger{};
    ledger.step = step;
  }
  return ledger;
}

Ledger& Store::book(Saving& saving) {
  Ledger& ledger = ledger_of(saving.site, saving.step);
  ledger.saves += 1;
  ledger.saved_bytes += saving.bytes;
  return ledger;
}

Charge Store::hold_bytes(Saving& saving, std::int64_t bytes) {
  saving.site.ledger.held_bytes += bytes;
  return {timeline_, saving.site, Timeline::Curve::kHeld, bytes};
}

void Store::charge_plain(Saved& saved, const Saving& saving, std::int64_t bytes) {
  Tracked* tracked = saving.tensor.has_storage() ? known(saving.tensor) : nullptr;
  std::shared_ptr<const Charge> plain;
  if (bytes > 0) {
    plain = make_small<Charge>(timeline_, saving.site, Timeline::Curve::kPlain, bytes);
    if (tracked) tracked->plain = plain;
  } else if (tracked) {
    plain = tracked->plain.lock();
  }
  saved.charge(std::move(plain));
}

Saved Store::saved(Saving& saving, View view, Saved::Kept kept, bool for_reader_only) {
  return Saved(saving.tensor, saving.site, sites_, std::move(view), std::move(kept),
               for_reader_only ? saving.demand.rule : nullptr);
}

Saved Store::save(const at::Tensor& tensor, Site& site, const Demand& demand, std::int64_t step,
                  const char* obstacle, bool tanh) {
  std::optional<at::AutoGradMode> no_grad;
  if (at::GradMode::is_enabled()) no_grad.emplace(false);  // autograd has, before it asks its hooks
  send_offered(kOfferedLookedAt);
  Saving saving{tensor, site, demand, step, saved_bytes(tensor)};
  const std::int64_t before = ledger_of(site, step).unique_bytes;
  Saved saved = keep(saving, obstacle ? obstacle : obstacle_in(tensor), tanh);
  charge_plain(saved, saving, site.ledger.unique_bytes - before);
  timeline_->saved(site);
  return saved;
}

Saved Store::keep(Saving& saving, const char* why_not, bool tanh) {
  const at::Tensor& tensor = saving.tensor;
  Site& site = saving.site;
  const Demand& demand = saving.demand;
  const std::int64_t bytes = saving.bytes;
  saving.width = width_of(site, demand, bytes, options_);
  if (is_parameter(tensor))
    return pass(saving, Kind::kParameter, "it is alive as long as the model");
  if (why_not) return pass(saving, Kind::kPassed, why_not);

  Tracked& tracked = track(tensor);
  saving.first = !tracked.site;
  if (saving.first) tracked.site = &site;
  site.first_saver = tracked.site;
  if (options_.observe_only) return observe(saving, tracked);
  if (sites_->keeps(site)) return hold(saving, tracked, Kind::kPassed, "named in keep=");
  const bool reads_values = demand.reads == Reads::kValues || demand.reads == Reads::kFinely;
  if (!policy_.empty()) {
    saving.rule = policy_.rule_for(site, sites_->path_of(site), tensor, bytes, demand.openable);
    if (saving.rule != Policy::kNone &&
        std::holds_alternative<codecs::Keep>(policy_[saving.rule].rule.codec))
      return hold(saving, tracked, Kind::kPassed, "codec=Keep()");
    if (!reads_values && !demand.openable) saving.rule = Policy::kNone;
  }
  if (saving.rule == Policy::kNone && reads_values && site.choice && site.choice->codec >= 0)
    saving.rule = Policy::menu_rule(site.choice->codec);
  if (tracked.copy && tracked.copy_version == tensor._version()) {
    Ledger& ledger = book(saving);
    ledger.unique_bytes += saving.first ? bytes : 0;
    describe(ledger, Kind::kParameterCopy, 0, "made again from its parameter", 0);
    return saved(saving, view_in_span(tensor, 0), tracked.copy, false);
  }
  if (bytes < options_.min_bytes || tensor.numel() == 0)
    return hold(saving, tracked, Kind::kPassed, "smaller than min_bytes");
  if (demand.reads == Reads::kGeometry) {
    // Memory that an earlier save holds is there when this one is read, which is sooner.
    const auto held = tracked.hold.lock();
    const bool there = held && held->version() == tensor._version() && !offload_.trip;
    return there ? hold(saving, tracked, Kind::kAlive, demand.reason) : keep_geometry(saving);
  }
  if (!element_type(tensor.scalar_type()))
    return hold(saving, tracked, Kind::kPassed, "type without a codec");
  if (site.op->compiled)
    return hold(saving, tracked, Kind::kPassed, "saved by a graph of torch.compile");
  site.exact_by.clear();
  if (auto shared = share(saving, tracked)) {
    site.derived = site.runs_products = false;
    return std::move(*shared);
  }
  if (auto derived = derive(saving, tracked)) return std::move(*derived);
  site.derived = site.runs_products = false;
  tell_of_values(saving, tracked);
  if (site.alive) return hold(saving, tracked, Kind::kAlive, "the program keeps it alive");
  if (saving.rule != Policy::kNone) {
    if (auto encoded = encode(saving, tracked, tanh)) return std::move(*encoded);
    saving.rule = Policy::kNone;
    if (auto shared = share(saving, tracked)) return std::move(*shared);
  }

  const Site::Sign sign = is_derivable(saving, tracked) ? Site::Sign::kOnlySign : site.sign.load();
  const Treatment treatment = choose(tensor, demand, sign, saving.width.choice);
  if (!treatment.format) {
    const bool part =
        treatment.by_choice && saving.bytes < static_cast<std::int64_t>(tensor.storage().nbytes());
    Saved held = part ? hold_part(saving, tracked, treatment.reason)
                      : hold(saving, tracked, treatment.kind, treatment.reason);
    if (treatment.by_choice || (options_.adaptive && demand.reads == Reads::kStart)) {
      site.root = nullptr;
      site.last_step = saving.step;
      count_packet(site.ledger.lossy, tensor, tensor.numel());
    }
    return held;
  }
  try {
    if (treatment.kind == Kind::kLossy && demand.reads != Reads::kStart)
      if (auto packed = pack_copied(saving, tracked)) return std::move(*packed);
    return pack(saving, tracked, treatment);
  } catch (const c10::Error& error) {
    TORCH_WARN_ONCE("backfold: a tensor could not be packed and is kept as it is: ",
                    error.what_without_backtrace());
    return hold(saving, tracked, Kind::kPassed, "packing failed");
  }
}

void Store::remember_copy(const at::Tensor& source, const at::Tensor& copy) {
  if (options_.observe_only || obstacle_in(source) || obstacle_in(copy) || !is_parameter(source))
    return;
  if (source.scalar_type() == copy.scalar_type() || source.device() != copy.device() ||
      !source.is_non_overlapping_and_dense() || source.strides() != copy.strides() ||
      copy.storage_offset() != 0)
    return;
  Tracked& tracked = track(copy);
  tracked.copy_landmark = landmark_of(source);
  if (is_buffer(source)) return;
  tracked.copy = std::make_shared<ParameterCopy>(source, copy);
  tracked.copy_version = copy._version();
  copied_[source.storage().unsafeGetStorageImpl()].push_back(&tracked);
}

void Store::judge_alive() {
  for (const Tracked& tracked : tracked_) {
    const auto hold = tracked.hold.lock();
    if (hold && tracked.site) tracked.site->alive = hold->alive_elsewhere();
  }
}

}  // namespace backfold::torch_layer
