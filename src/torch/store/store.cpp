// SPDX-License-Identifier: Apache-2.0

#include "torch/store/store.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

namespace backfold::torch_layer {

// One save on its way through the store.
struct Store::Saving {
  const at::Tensor& tensor;
  Site& site;
  const Demand& demand;
  const std::int64_t step;
  const std::int64_t bytes;  // that autograd would keep for this save
  bool first = false;        // save of its storage in this block
  int rule = Policy::kNone;  // of the policy
  Width width = {};
};

namespace {

std::uint64_t scramble(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// The kind of a site in a report is that of the save that holds most.
void describe(Ledger& ledger, Kind kind, int bits, const char* reason, std::int64_t held,
              const Grouping& grouping = {}) {
  if (held <= ledger.kind_bytes) return;
  ledger.kind = kind;
  ledger.grouping = grouping;
  ledger.bits = bits;
  ledger.reason = reason;
  ledger.kind_bytes = held;
}

void count_lossy(Ledger& ledger, const at::Tensor& tensor, std::int64_t count) {
  const auto groups = groups_of(tensor);
  ledger.lossy.elements += count;
  ledger.lossy.packets += 1;
  ledger.lossy.element_bytes = static_cast<std::int64_t>(tensor.element_size());
  for (std::size_t i = 0; i < groups.size(); ++i)
    ledger.lossy.groups[i] += groups[i] > 0 ? groups[i] : groups[0];
}

Kind kind_of(const Codec& codec) {
  struct Names {
    Kind operator()(const codecs::Quantize& one) const {
      return one.per_sample ? Kind::kPerSample : Kind::kLossy;
    }
    Kind operator()(const codecs::Pool&) const { return Kind::kPooled; }
    Kind operator()(const codecs::PoolResidual&) const { return Kind::kPoolResidual; }
    Kind operator()(const codecs::Project&) const { return Kind::kProjected; }
    Kind operator()(const codecs::RunningRange&) const { return Kind::kRunningRange; }
    Kind operator()(const codecs::FewBit&) const { return Kind::kFewBit; }
    Kind operator()(const codecs::Exact&) const { return Kind::kRaw; }
    Kind operator()(const codecs::Keep&) const { return Kind::kPassed; }
  };
  return std::visit(Names{}, codec);
}

bool same(const View& a, const View& b) {
  return a.offset == b.offset && a.sizes == b.sizes && a.strides == b.strides;
}

}  // namespace

Store::Store(const StoreOptions& options, std::shared_ptr<SiteTable> sites, Policy& policy,
             const std::vector<Parameter>& parameters)
    : options_(options), sites_(std::move(sites)), policy_(policy) {
  parameters_.reserve(parameters.size());
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
  if (const auto found = storages_.find(storage); found != storages_.end())
    return found->second.copy_landmark;
  // Without a model, parameters are known by what they are.
  return parameters_.empty() && is_parameter(tensor) ? sites_->nameless_landmark(storage) : 0;
}

bool Store::is_parameter(const at::Tensor& tensor) const {
  if (tensor.is_leaf() && tensor.requires_grad()) return true;
  if (tensor.has_storage() && parameters_.count(tensor.storage().unsafeGetStorageImpl()))
    return true;
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
          scramble(site.hash ^ scramble(static_cast<std::uint64_t>(step) << 20 ^ draw))};
}

Ledger& Store::book(Saving& saving) {
  Ledger& ledger = saving.site.ledger;
  if (ledger.step != saving.step) {
    ledger = Ledger{};
    ledger.step = saving.step;
  }
  ledger.saves += 1;
  ledger.saved_bytes += saving.bytes;
  return ledger;
}

Saved Store::saved(Saving& saving, View view, Saved::Kept kept, bool for_reader_only) {
  return Saved(saving.tensor, saving.site, sites_, std::move(view), std::move(kept),
               for_reader_only ? saving.demand.rule : nullptr);
}

Saved Store::pass(Saving& saving, Kind kind, const char* reason) {
  Ledger& ledger = book(saving);
  const bool counted = kind != Kind::kParameter;
  ledger.unique_bytes += counted ? saving.bytes : 0;
  ledger.held_bytes += counted ? saving.bytes : 0;
  describe(ledger, kind, 0, reason, saving.bytes);
  // A result would form a cycle with the node that saves it, so it is kept without its history.
  return saved(saving, {}, saving.tensor.is_leaf() ? saving.tensor : saving.tensor.tensor_data(),
               false);
}

Saved Store::keep_geometry(Saving& saving) {
  Ledger& ledger = book(saving);
  ledger.unique_bytes += saving.first ? saving.bytes : 0;
  describe(ledger, Kind::kGeometry, 0, saving.demand.reason, 0);
  return saved(saving, view_in_span(saving.tensor, saving.tensor.storage_offset()),
               saving.tensor.device(), true);
}

Saved Store::hold(Saving& saving, Tracked& tracked, Kind kind, const char* reason) {
  const std::uint32_t version = saving.tensor._version();
  Ledger& ledger = book(saving);
  const auto storage_bytes = static_cast<std::int64_t>(saving.tensor.storage().nbytes());
  ledger.unique_bytes += saving.first ? storage_bytes : 0;
  std::shared_ptr<Hold> hold = tracked.hold.lock();
  if (hold && hold->version() == version) {
    ledger.duplicate_bytes += saving.bytes;
    describe(ledger, Kind::kShared, 0, "held by reference", 0);
  } else {
    hold = std::make_shared<Hold>(saving.tensor.storage(), version,
                                  kind == Kind::kAlive ? &saving.site : nullptr);
    tracked.hold = hold;
    ledger.held_bytes += kind == Kind::kAlive ? 0 : storage_bytes;
    describe(ledger, kind, 0, reason, storage_bytes);
  }
  if (kind != Kind::kAlive) hold->pin();
  return saved(saving, view_in_span(saving.tensor, 0), std::move(hold), false);
}

// A copy, as the storage holds more than was planned for.
Saved Store::hold_part(Saving& saving, Tracked& tracked, const char* reason) {
  const at::Tensor& tensor = saving.tensor;
  const std::uint32_t version = tensor._version();
  const View original = view_in_span(tensor, 0);
  Ledger& ledger = book(saving);
  ledger.unique_bytes += saving.first ? static_cast<std::int64_t>(tensor.storage().nbytes()) : 0;
  for (const Tracked::Part& part : tracked.parts) {
    const auto copy = part.copy.lock();
    if (!copy || copy->version() != version || !same(part.original, original)) continue;
    ledger.duplicate_bytes += saving.bytes;
    describe(ledger, Kind::kShared, 0, "held by an earlier save", 0);
    return saved(saving, part.view, copy, false);
  }
  const at::Tensor copy = without_gaps(tensor);
  const auto hold = std::make_shared<Hold>(copy.storage(), version, nullptr);
  hold->pin();
  tracked.parts.push_back({original, view_in_copy(tensor, copy), hold});
  const auto bytes = static_cast<std::int64_t>(copy.nbytes());
  ledger.held_bytes += bytes;
  describe(ledger, Kind::kRaw, 0, reason, bytes);
  return saved(saving, tracked.parts.back().view, hold, false);
}

std::optional<Saved> Store::share(Saving& saving, Tracked& tracked) {
  const at::Tensor& tensor = saving.tensor;
  const std::uint32_t version = tensor._version();
  if (const auto hold = tracked.hold.lock(); hold && hold->version() == version) {
    const bool needed = saving.demand.reads == Reads::kExactly || !saving.width.choice;
    return this->hold(saving, tracked, needed ? Kind::kRaw : Kind::kAlive, "");
  }
  const Span span = span_of(tensor);
  const int bits = saving.width.least;
  for (const auto& known : tracked.packets) {
    const auto packet = known.lock();
    if (!packet || packet->version() != version || packet->type() != tensor.scalar_type() ||
        packet->stream() != current_stream(tensor.device()) || packet->rule() != saving.rule)
      continue;
    View view = view_in_span(tensor, packet->span().begin);
    if (packet->is_copy()) {
      if (!same(view_in_span(tensor, 0), *packet->original())) continue;
    } else if (!packet->span().contains(span) || packet->span().count > 4 * span.count) {
      continue;
    }
    if (saving.demand.reads != Reads::kPredicate) packet->values_are_read();
    if (!serves(*packet, saving.site, saving.demand, bits) ||
        !serves_norm(*packet, saving.demand, tensor)) {
      if (options_.adaptive && Policy::is_planned(saving.rule))
        packet->site().served_floor = std::max(packet->site().served_floor, bits);
      continue;
    }
    if (packet->is_planned()) {
      saving.site.root = &packet->site();
      saving.site.floor = std::max(saving.site.floor, saving.demand.bits);
    }
    if (packet->is_copy()) view = packet->packed_view();
    Ledger& ledger = book(saving);
    ledger.duplicate_bytes += saving.bytes;
    describe(ledger, Kind::kShared, bits, "served by the packet of an earlier save", 0);
    const auto* predicate = std::get_if<PredicateFormat>(&packet->format());
    return saved(saving, std::move(view), packet,
                 predicate && predicate->type != ElementType::kBool);
  }
  return std::nullopt;
}

Saved Store::pack(Saving& saving, Tracked& tracked, const Treatment& treatment, at::Tensor copy) {
  const at::Tensor& tensor = saving.tensor;
  const Span span = span_of(tensor);
  const bool in_place = fills_its_span(tensor, span);
  if (!in_place && !copy.defined()) copy = without_gaps(tensor);
  const std::int64_t count = in_place ? span.count : copy.numel();
  Format format = *treatment.format;
  set_count(format, count);
  const std::int64_t bytes = packed_bytes(format);
  if (bytes == 0 || bytes >= count * static_cast<std::int64_t>(tensor.element_size()))
    return hold(saving, tracked, Kind::kPassed, "a packet would not be smaller");

  const at::Tensor* dense_copy = in_place ? nullptr : &copy;
  const at::Tensor& dense = in_place ? tensor : copy;
  const std::optional<NormRows> rows =
      rows_to_normalise(format, saving.demand, dense, !options_.adaptive || saving.site.choice);
  const auto packet =
      std::make_shared<SharedPacket>(tensor, span, dense_copy, format, saving.site, saving.rule);
  const Key key = next_key(saving.site, saving.step);
  if (!rows) {
    packet->pack(tensor, dense_copy, key, std::nullopt);
  } else if (saving.demand.norm->has_statistics()) {
    packet->wait(dense, key, *saving.demand.norm, *rows);
    waiting_ = packet;
  } else {
    packet->pack(tensor, dense_copy, key, scale_of(*rows, dense));
  }
  const bool sign =
      saving.demand.reads == Reads::kPredicate && saving.demand.rule->sign_of_nonnegative;
  if (sign) packet->learn_sign();
  tracked.packets.push_back(packet);

  Ledger& ledger = book(saving);
  ledger.unique_bytes += saving.first ? static_cast<std::int64_t>(tensor.storage().nbytes()) : 0;
  ledger.held_bytes += bytes;
  ledger.elements += count;
  describe(ledger, treatment.kind, code_bits(format), treatment.reason, bytes,
           saving.width.choice.value_or(Choice{}).grouping);
  if (packet->is_planned()) {
    saving.site.root = nullptr;
    saving.site.zero_exact = treatment.kind == Kind::kZeroExact;
    saving.site.last_step = saving.step;
    saving.site.floor = std::max(saving.site.floor, saving.demand.bits);
    count_lossy(ledger, tensor, count);
  } else if (treatment.kind == Kind::kPerSample) {
    saving.site.root = nullptr;
    count_lossy(ledger, tensor, count);
  }
  return saved(saving, packet->packed_view(), packet, treatment.kind == Kind::kPredicate);
}

std::optional<Saved> Store::encode(Saving& saving, Tracked& tracked, bool tanh) {
  const Policy::NamedRule& chosen = policy_[saving.rule];
  const Codec& codec = chosen.rule.codec;
  const at::Tensor& tensor = saving.tensor;
  const Treatment exact = choose(tensor, saving.demand, saving.site.sign, std::nullopt);
  if (exact.format) return pack(saving, tracked, exact);
  if (std::holds_alternative<codecs::Exact>(codec))
    return hold(saving, tracked, Kind::kRaw, "codec=Exact()");
  const at::Tensor copy =
      fills_its_span(tensor, span_of(tensor)) ? at::Tensor() : without_gaps(tensor);
  const at::Tensor& dense = copy.defined() ? copy : tensor;
  Site& site = saving.site;
  const auto* quantize = std::get_if<codecs::Quantize>(&codec);
  const auto* ranged = std::get_if<codecs::RunningRange>(&codec);
  // What is read finely has a floor that a user's width does not undercut, as with bits=.
  const bool coarse =
      saving.demand.reads == Reads::kFinely && !ranged && !(quantize && !quantize->per_sample);
  Coding coding = Misfit{"takes no tensor that is read finely", true};
  if (!coarse) {
    Codec used = codec;
    if (quantize && !quantize->per_sample)
      used = codecs::Quantize{named_width(quantize->bits, saving.demand)};
    coding =
        coding_for(used, dense, {site.op->name, tanh, site.shares},
                   {options_.seed, scramble(site.hash ^ static_cast<std::uint64_t>(saving.step))});
  }
  if (const auto* misfit = std::get_if<Misfit>(&coding)) {
    const std::string& path = sites_->path_of(site).name;
    TORCH_CHECK_VALUE(misfit->only_small || !chosen.is_strict(),
                      "codec: ", backfold::describe(codec), " ", misfit->why, ", saved by ",
                      site.op->name, " (", site.slot, ")", path.empty() ? "" : " in ", path);
    return std::nullopt;
  }
  if (!site.memory) site.memory = std::make_shared<CodecMemory>();
  if (ranged) site.memory->decay = ranged->decay;
  if (!Policy::is_planned(saving.rule)) site.rule = saving.rule;
  site.last_step = saving.step;
  site.memory->wants_scores = options_.wants_scores;
  if (quantize && quantize->per_sample)
    met_samples_ |= weigh_samples(*site.memory, options_.samples, tensor);
  return pack(saving, tracked, {kind_of(codec), chosen.reason.c_str(), std::get<Format>(coding)},
              copy);
}

Saved Store::save(const at::Tensor& tensor, Site& site, const Demand& demand, std::int64_t step,
                  const char* obstacle, bool tanh) {
  const at::AutoGradMode no_grad(false);
  const char* why = obstacle ? obstacle : obstacle_in(tensor);
  const std::int64_t bytes = saved_bytes(tensor);
  Saving saving{tensor, site, demand, step, bytes};
  saving.width = width_of(site, demand, bytes, options_);
  if (is_parameter(tensor))
    return pass(saving, Kind::kParameter, "it is alive as long as the model");
  if (why) return pass(saving, Kind::kPassed, why);

  const auto [found, first] =
      storages_.try_emplace(tensor.storage().unsafeGetStorageImpl(), tensor.storage());
  Tracked& tracked = found->second;
  saving.first = first || !tracked.site;
  if (saving.first) tracked.site = &site;
  if (options_.observe_only) return hold(saving, tracked, Kind::kRaw, demand.reason);
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
  if (demand.reads == Reads::kGeometry) return keep_geometry(saving);
  if (!element_type(tensor.scalar_type()))
    return hold(saving, tracked, Kind::kPassed, "type without a codec");
  if (site.op->compiled)
    return hold(saving, tracked, Kind::kPassed, "saved by a graph of torch.compile");
  if (auto shared = share(saving, tracked)) return std::move(*shared);
  if (site.alive) return hold(saving, tracked, Kind::kAlive, "somebody else keeps it");
  if (saving.rule != Policy::kNone) {
    if (auto encoded = encode(saving, tracked, tanh)) return std::move(*encoded);
    saving.rule = Policy::kNone;
    if (auto shared = share(saving, tracked)) return std::move(*shared);
  }

  const Treatment treatment = choose(tensor, demand, site.sign, saving.width.choice);
  if (!treatment.format) {
    const bool part =
        treatment.by_choice && saving.bytes < static_cast<std::int64_t>(tensor.storage().nbytes());
    Saved held = part ? hold_part(saving, tracked, treatment.reason)
                      : hold(saving, tracked, treatment.kind, treatment.reason);
    if (treatment.by_choice) {
      site.root = nullptr;
      site.last_step = step;
      count_lossy(site.ledger, tensor, tensor.numel());
    }
    return held;
  }
  try {
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
  const auto [found, first] =
      storages_.try_emplace(copy.storage().unsafeGetStorageImpl(), copy.storage());
  found->second.copy_landmark = landmark_of(source);
  if (is_buffer(source)) return;
  found->second.copy = std::make_shared<ParameterCopy>(source, copy);
  found->second.copy_version = copy._version();
  copied_[source.storage().unsafeGetStorageImpl()].push_back(found->first);
}

void Store::about_to_write(const at::Tensor& tensor) {
  if (copied_.empty() || !tensor.has_storage()) return;
  const auto found = copied_.find(tensor.storage().unsafeGetStorageImpl());
  if (found == copied_.end()) return;
  for (const c10::StorageImpl* storage : found->second) {
    std::shared_ptr<ParameterCopy>& copy = storages_.at(storage).copy;
    if (copy.use_count() > 1) {
      copy->keep();
    } else {
      copy.reset();
    }
  }
  copied_.erase(found);
}

void Store::judge_alive() {
  for (auto& [address, tracked] : storages_) {
    const auto hold = tracked.hold.lock();
    if (hold && tracked.site) tracked.site->alive = hold->alive_elsewhere();
  }
}

}  // namespace backfold::torch_layer
