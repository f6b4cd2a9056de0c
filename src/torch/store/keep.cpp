// SPDX-License-Identifier: Apache-2.0
//
// The ways to keep a tensor: by reference, by its geometry, by an earlier packet, or in a packet of
// its own.

#include <c10/util/Exception.h>

#include "torch/store/saving.h"
#include "torch/store/small_objects.h"

namespace backfold::torch_layer {
namespace {

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

}  // namespace

void describe(Ledger& ledger, Kind kind, int bits, const char* reason, std::int64_t held,
              const Grouping& grouping) {
  if (held <= ledger.kind_bytes) return;
  ledger.kind = kind;
  ledger.grouping = grouping;
  ledger.bits = bits;
  ledger.reason = reason;
  ledger.kind_bytes = held;
}

void count_packet(Footprint& footprint, const at::Tensor& tensor, std::int64_t count) {
  const auto groups = groups_of(tensor);
  footprint.elements += count;
  footprint.packets += 1;
  footprint.element_bytes = static_cast<std::int64_t>(tensor.element_size());
  for (std::size_t i = 0; i < groups.size(); ++i)
    footprint.groups[i] += groups[i] > 0 ? groups[i] : groups[0];
}

Saved Store::pass(Saving& saving, Kind kind, const char* reason) {
  Ledger& ledger = book(saving);
  const bool counted = kind != Kind::kParameter;
  ledger.unique_bytes += counted ? saving.bytes : 0;
  describe(ledger, kind, 0, reason, saving.bytes);
  // A result would form a cycle with the node that saves it, so it is kept without its history.
  Saved passed = saved(
      saving, {}, saving.tensor.is_leaf() ? saving.tensor : saving.tensor.tensor_data(), false);
  if (counted) passed.charge(hold_bytes(saving, saving.bytes));
  return passed;
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
  const bool known = hold && hold->version() == version;
  if (!known) {
    hold = make_small<Hold>(saving.tensor.storage(), version,
                            kind == Kind::kAlive ? &saving.site : nullptr);
    tracked.hold = hold;
  }
  // The first that needs it in any case holds it, also where an earlier save took it for alive.
  const bool holds = kind != Kind::kAlive && hold->pin();
  if (holds) {
    hold->charge(hold_bytes(saving, storage_bytes));
    offer(hold, saving.site, &tracked);
  }
  if (known) ledger.duplicate_bytes += saving.bytes;
  if (known && !holds) {
    describe(ledger, Kind::kShared, 0, "held by reference", 0);
  } else {
    describe(ledger, kind, 0, reason, storage_bytes);
  }
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
    if (!copy || copy->version() != version || !(part.original == original)) continue;
    ledger.duplicate_bytes += saving.bytes;
    describe(ledger, Kind::kShared, 0, "held by an earlier save", 0);
    return saved(saving, part.view, copy, false);
  }
  const at::Tensor copy = without_gaps(tensor);
  const auto hold = std::make_shared<Hold>(copy.storage(), version, nullptr);
  const auto bytes = static_cast<std::int64_t>(copy.nbytes());
  hold->pin();
  hold->charge(hold_bytes(saving, bytes));
  offer(hold, saving.site, nullptr);
  tracked.parts.push_back({original, view_in_copy(tensor, copy), hold});
  describe(ledger, Kind::kRaw, 0, reason, bytes);
  return saved(saving, tracked.parts.back().view, hold, false);
}

std::optional<Saved> Store::share(Saving& saving, Tracked& tracked) {
  const at::Tensor& tensor = saving.tensor;
  const std::uint32_t version = tensor._version();
  if (const auto hold = tracked.hold.lock(); hold && hold->version() == version) {
    const bool needed = saving.demand.reads == Reads::kExactly || !saving.width.choice;
    if (!needed && tracked.site != &saving.site &&
        is_unfolded_by_choice(*tracked.site, saving.step)) {
      saving.site.root = tracked.site;
      saving.site.floor = std::max(saving.site.floor, saving.demand.bits);
    }
    return this->hold(saving, tracked, needed ? Kind::kRaw : Kind::kAlive, saving.demand.reason);
  }
  const Span span = span_of(tensor);
  const int bits = saving.width.least;
  for (const Tracked::Packed& known : tracked.packets) {
    const auto packet = known.packet.lock();
    if (!packet || known.write != tracked.writes || packet->version() != version ||
        packet->type() != tensor.scalar_type() ||
        packet->stream() != current_stream(tensor.device()) || packet->rule() != saving.rule)
      continue;
    auto view = packet->view_of(view_in_span(tensor, 0));
    if (!view || (!packet->is_copy() && packet->span().count > 4 * span.count)) continue;
    if (!serves(*packet, saving.site, saving.demand, bits) ||
        !serves_norm(*packet, saving.demand, tensor)) {
      if (saving.demand.reads == Reads::kStart) saving.site.beside = &packet->site();
      if (options_.adaptive && Policy::is_planned(saving.rule))
        packet->site().served_floor = std::max(packet->site().served_floor, bits);
      continue;
    }
    if (saving.demand.reads != Reads::kPredicate) packet->values_are_read();
    if (packet->is_planned()) {
      saving.site.root = &packet->site();
      saving.site.floor = std::max(saving.site.floor, saving.demand.bits);
    }
    Ledger& ledger = book(saving);
    ledger.duplicate_bytes += saving.bytes;
    describe(ledger, Kind::kShared, bits, "served by the packet of an earlier save", 0);
    const auto* predicate = std::get_if<PredicateFormat>(&packet->format());
    return saved(saving, std::move(*view), packet,
                 predicate && predicate->type != ElementType::kBool);
  }
  return std::nullopt;
}

void Store::tell_of_values(const Saving& saving, const Tracked& tracked) {
  if (saving.demand.reads == Reads::kPredicate) return;
  for (const Tracked::Packed& known : tracked.packets)
    if (const auto packet = known.packet.lock(); packet && known.write == tracked.writes)
      packet->values_are_read();
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
      make_small<SharedPacket>(tensor, span, dense_copy, format, saving.site, saving.rule);
  const Key key = next_key(saving.site, saving.step);
  if (saving.demand.shares_along && packet->is_planned())
    packet->shares_add_up(*saving.demand.shares_along);
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
  tracked.packets.push_back({packet, tracked.writes});

  Ledger& ledger = book(saving);
  ledger.unique_bytes += saving.first ? static_cast<std::int64_t>(tensor.storage().nbytes()) : 0;
  packet->charge(hold_bytes(saving, bytes));
  ledger.elements += count;
  describe(ledger, treatment.kind, code_bits(format), treatment.reason, bytes,
           saving.width.choice.value_or(Choice{}).grouping);
  if (packet->is_planned()) {
    saving.site.root = nullptr;
    saving.site.zero_exact = treatment.kind == Kind::kZeroExact;
    saving.site.last_step = saving.step;
    saving.site.floor = std::max(saving.site.floor, saving.demand.bits);
    count_packet(ledger.lossy, tensor, count);
  } else if (treatment.kind == Kind::kPerSample) {
    saving.site.root = nullptr;
    count_packet(ledger.lossy, tensor, count);
  }
  if (leaves(saving.site)) packet->leave(passage_of(saving.site));
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
  TORCH_CHECK_VALUE(!options_.turn || !std::holds_alternative<codecs::Project>(codec),
                    "codec: ", backfold::describe(codec),
                    " cannot be captured in a CUDA graph: each replay would project by the same "
                    "matrix");
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

}  // namespace backfold::torch_layer
