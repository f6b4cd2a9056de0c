// SPDX-License-Identifier: Apache-2.0
//
// Which tensors are made again: what their readers need, and how that is booked. sources.cpp finds
// what they are made from.

#include <algorithm>

#include "torch/reads/recipes.h"
#include "torch/store/saving.h"
#include "torch/store/small_objects.h"

namespace backfold::torch_layer {
namespace {

// Steps in which a site looks for a better cut: the first one does not know yet what else keeps its
// tensors.
constexpr int kLooksForCut = 2;

void note_recipe(Ledger& ledger, const Derived& made, std::int64_t bytes) {
  const Effort& effort = made.effort();
  ledger.recipe = effort.operators;
  ledger.moved_bytes += effort.moved_for(bytes);
  ledger.transient_bytes = std::max(ledger.transient_bytes, effort.transient_for(made.bytes()));
  std::int64_t most = -1;
  for (const auto& [kept, leaf] : effort.leaves) {
    if (leaf.bytes <= most) continue;
    most = leaf.bytes;
    ledger.source = leaf.site;
  }
}

// What was measured of a root stays.
void note_roots(Site& site, const std::vector<Site*>& roots) {
  site.derived = true;
  site.root = roots.empty() ? nullptr : roots[0];
  c10::SmallVector<Site::Also, 1> also;
  for (std::size_t i = 1; i < roots.size(); ++i) {
    const auto* known = std::find_if(site.also.begin(), site.also.end(),
                                     [&](const Site::Also& one) { return one.root == roots[i]; });
    also.push_back(known == site.also.end() ? Site::Also{roots[i], {}} : *known);
  }
  site.also = std::move(also);
}

}  // namespace

std::shared_ptr<Derived> Store::derived(Value& value, const Need& need) {
  if (auto known = value.derived.lock()) {
    const Effort& effort = known->effort();
    const bool serves = !need.exact && !need.rows && effort.bits >= need.bits;
    if (!effort.rounded || serves) return known;
  }
  if (value.op->product && !need.products) return nullptr;
  Effort effort;
  std::vector<Source> sources = sources_of(value, need, effort);
  if (sources.empty()) return nullptr;
  Derived::Making making{.op = value.op,
                         .arguments = value.arguments,
                         .sources = std::move(sources),
                         .bits = {},
                         .view = value.view,
                         .type = value.type,
                         .device = value.device};
  if (effort.rounded && value.op->recipe->on_rounded == Recipe::OnRounded::kBits) {
    making.bits = own_bits(value);
    if (!making.bits) return nullptr;
  }
  std::vector<Tracked*> held;
  for (std::size_t i = 0; i < making.sources.size(); ++i)
    if (std::holds_alternative<std::shared_ptr<Hold>>(making.sources[i].kept))
      held.push_back(value.inputs[i].value->home);
  const auto made = make_small<Derived>(std::move(making), std::move(effort), need.reader);
  for (Tracked* home : held) home->dependents.push_back(made);
  value.derived = made;
  return made;
}

Store::Need Store::need_of(const Saving& saving) const {
  const Demand& demand = saving.demand;
  // A norm multiplies the noise that rows lend each other in the groups of another tensor's packet.
  const bool norm = demand.norm && !demand.norm->norm->until_planned;
  const auto& choice = saving.width.choice;
  const bool raw = demand.reads == Reads::kExactly || !choice || choice->bits == kRawBits;
  // What a checkpoint starts again from was measured as rounded itself, not as made of others.
  const bool exact = raw || norm || demand.reads == Reads::kStart;
  // Beside tensors of a few bits, only what is small is worth a reference.
  return {.exact = exact,
          .bits = exact ? 0 : choice->bits,
          .bytes = saving.bytes,
          .instead = raw ? saving.bytes - 1 : saving.bytes / 16,
          .reader = saving.site};
}

at::Tensor Store::copied(const Tracked& tracked) const {
  const Value* value = tracked.value;
  if (!value || !value->op || value->inputs.size() != 1) return {};
  const Value::Input& input = value->inputs[0];
  const Value& source = *input.value;
  if (source.parameter || source.buffer || !source.in_graph || !source.is_current() ||
      input.counter.moved())
    return {};
  const bool wider = value->op->recipe->fused == Recipe::Fused::kCast &&
                     c10::elementSize(input.type) < c10::elementSize(value->type) &&
                     c10::isFloatingType(input.type);
  const bool longer =
      value->op->name == "aten::clone" &&
      2 * bytes_of(without_repeats(input.view), input.type) <= bytes_of(value->view, value->type);
  auto alive = source.home->storage.lock();
  if (!alive || !(wider || longer)) return {};
  at::Tensor tensor = tensor_at(c10::Storage(std::move(alive)), input.view, input.type);
  tensor.unsafeGetTensorImpl()->set_version_counter(input.counter.count);
  return tensor;
}

at::Tensor Store::copied_by(const at::Tensor& tensor) const {
  const Tracked* tracked = known(tensor);
  return tracked ? copied(*tracked) : at::Tensor();
}

std::optional<Saved> Store::pack_copied(Saving& saving, Tracked& tracked) {
  saving.site.packs_copied = false;
  if (!options_.derive || !saving.width.choice || saving.width.choice->bits == kRawBits ||
      !Policy::is_planned(saving.rule))
    return std::nullopt;
  const at::Tensor source = copied(tracked);
  if (!source.defined() || tracked.value->version != saving.tensor._version() ||
      saved_bytes(source) < options_.min_bytes)
    return std::nullopt;
  const Treatment treatment =
      choose(source, saving.demand, Site::Sign::kAlsoValues, saving.width.choice);
  if (treatment.kind != Kind::kLossy || !treatment.format) return std::nullopt;
  Saving of_source{source, saving.site, saving.demand, saving.step, saving.bytes};
  of_source.width = saving.width;
  of_source.first = saving.first;
  Tracked& home = *tracked.value->inputs[0].value->home;
  const Saved packed = pack(of_source, home, treatment);
  // Not from a packet that another reader left: it may have fewer bits, or mix the rows of a norm.
  Need need{.exact = false,
            .bits = saving.width.choice->bits,
            .bytes = saving.bytes,
            .instead = 0,
            .reader = saving.site};
  if (const auto& norm = saving.demand.norm; norm && !norm->norm->until_planned)
    need.rows = rows_of(*norm, source);
  const auto made = derived(*tracked.value, need);
  TORCH_CHECK(made, "backfold: ", saving.site.op->name, " could not be derived from its packet");
  made->save(saving.tensor.storage());
  saving.site.packs_copied = true;
  return saved(saving, view_in_span(saving.tensor, 0), made, false);
}

std::shared_ptr<Hold> Store::refer_to(const at::Tensor& tensor) {
  if (obstacle_in(tensor)) return nullptr;
  Value& value = value_at(tensor);
  auto hold = value.home->hold.lock();
  if (hold) return hold;
  hold = std::make_shared<Hold>(tensor.storage(), value.version, nullptr);
  value.home->hold = hold;
  return hold;
}

std::shared_ptr<Derived> Store::derivation_of(const at::Tensor& tensor, Site& site) {
  const Tracked* tracked = known(tensor);
  Value* value = tracked ? tracked->value : nullptr;
  if (!value || !value->op || value->type != tensor.scalar_type() || stored_for_others(*tracked))
    return nullptr;
  auto made = derived(*value, {.exact = true,
                               .bits = 0,
                               .bytes = saved_bytes(tensor),
                               .instead = saved_bytes(tensor) / 16,
                               .products = site.runs_products,
                               .reader = site});
  value->saved |= made != nullptr;
  return made;
}

Saved Store::observe(Saving& saving, Tracked& tracked) {
  // Before it is held itself, which would be the shortest way.
  const auto made = derivation_of(saving.tensor, saving.site);
  Saved held = hold(saving, tracked, Kind::kRaw, saving.demand.reason);
  if (made) note_recipe(saving.site.ledger, *made, saving.bytes);
  return held;
}

bool Store::is_derivable(const Saving& saving, const Tracked& tracked) {
  const Value* value = tracked.value;
  if (saving.demand.reads != Reads::kPredicate || !value || !value->op ||
      value->version != saving.tensor._version() || stored_for_others(tracked))
    return false;
  Need need = need_of(saving);
  need.bits = 0;  // what the values need is known when they are read
  need.products = tracked.site->remade;
  Effort effort;
  return !sources_of(*value, need, effort).empty();
}

void Store::note_remaking(const Saving& saving, const Tracked& tracked) {
  Need need = need_of(saving);
  need.products = true;
  need.instead = std::min(need.instead, saving.bytes / 16);
  need.bits = 0;  // the plan decides on those of its sources
  Effort effort;
  Site& site = *tracked.site;
  site.remaking.reset();
  if (saving.site.alive || sources_of(*tracked.value, need, effort).empty() || effort.products == 0)
    return;
  Remaking& remaking = site.remaking.emplace();
  remaking.step = saving.step;
  remaking.bytes = static_cast<std::int64_t>(saving.tensor.storage().nbytes());
  remaking.exact = saving.demand.reads == Reads::kExactly || !saving.width.choice;
  remaking.laps.assign(effort.laps.begin(), effort.laps.end());
  for (const auto& [kept, leaf] : effort.leaves)
    if (leaf.site) remaking.from.push_back(const_cast<Site*>(leaf.site));
}

bool Store::stored_for_others(const Tracked& tracked) const {
  return tracked.site && tracked.site->stored_for_others && !options_.products;
}

namespace {

void add_once(Site* site, c10::SmallVectorImpl<Site*>& sites) {
  if (std::find(sites.begin(), sites.end(), site) == sites.end()) sites.push_back(site);
}

// What a value was made from by products, or from such values.
template <typename Visit>
void visit_made_by_products(const Value& value, const Visit& visit) {
  for (const Value::Input& input : value.inputs)
    if (const auto made = input.value->derived.lock();
        made && (made->effort().products > 0 || made->effort().of_products))
      visit(*input.value, made->effort().products > 0);
}

}  // namespace

void Store::add_packets_instead(const Value& value, c10::SmallVectorImpl<Site*>& sites) const {
  visit_made_by_products(value, [&](const Value& source, bool) {
    Site* const site = source.saved ? source.home->site : nullptr;
    if (site) {
      add_once(site->derived && site->root ? site->root : site, sites);
    } else {
      add_packets_instead(source, sites);
    }
  });
}

void Store::add_products(const Value& value, c10::SmallVectorImpl<Site*>& sites) const {
  visit_made_by_products(value, [&](const Value& source, bool product) {
    if (product && source.saved && source.home->site) {
      add_once(source.home->site, sites);
    } else {
      add_products(source, sites);
    }
  });
}

void Store::learn_cut(const Saving& saving, const Value& value, Need need) {
  Site& site = saving.site;
  if (options_.products || site.looks_for_cut == kLooksForCut) return;
  ++site.looks_for_cut;
  std::vector<std::pair<Site*, std::int64_t>> stored;
  need.if_stored = &stored;
  Effort effort;
  if (sources_of(value, need, effort).empty()) return;
  std::int64_t bytes = 0;
  for (const auto& [first_saver, own] : stored) bytes += own;
  if (bytes >= saving.bytes) return;
  for (const auto& [first_saver, own] : stored) first_saver->stored_for_others = true;
}

void Store::note_spared(const Saving& saving, Value& value, const Effort& effort,
                        std::int64_t instead) {
  const at::Tensor& tensor = saving.tensor;
  Ledger& ledger = saving.site.ledger;
  ledger.device = tensor.device();
  const auto& choice = saving.width.choice;
  const bool raw = saving.demand.reads == Reads::kExactly || !choice || choice->bits == kRawBits;
  std::int64_t packet = saving.bytes;
  if (!raw) {
    Format format = group_format(tensor, *element_type(tensor.scalar_type()), *choice, false);
    set_count(format, tensor.numel());
    packet = packed_bytes(format);
    ledger.spared_moves += packet + saving.bytes;  // unpacking
  }
  ledger.spared_bytes -= instead;
  if (std::exchange(value.spared, true)) return;  // an earlier reader's packet would have served
  ledger.spared_bytes += packet;
  if (!raw) ledger.spared_moves += saving.bytes + packet;
  const std::string_view op = value.op->recipe->op;
  if (!effort.rounded || (op != "aten::relu" && op != "aten::relu_")) return;
  // It would have read its signs from the packet.
  if (const auto bits = own_bits(value))
    ledger.spared_bytes -=
        packed_bytes(std::get<std::shared_ptr<SharedPacket>>(bits->kept)->format());
}

std::optional<Saved> Store::derive(Saving& saving, Tracked& tracked) {
  const at::Tensor& tensor = saving.tensor;
  Value* value = tracked.value;
  const bool reads_values =
      saving.demand.reads == Reads::kValues || saving.demand.reads == Reads::kFinely ||
      saving.demand.reads == Reads::kExactly || saving.demand.reads == Reads::kStart;
  if (!value || !value->op || !reads_values || !Policy::is_planned(saving.rule) ||
      value->version != tensor._version() || value->type != tensor.scalar_type() ||
      stored_for_others(tracked))
    return std::nullopt;
  const bool known = !value->derived.expired();
  if (options_.times_products) note_remaking(saving, tracked);
  Need need = need_of(saving);
  need.products = tracked.site->remade;
  if (need.products) {
    need.instead = std::min(need.instead, saving.bytes / 16);
    // A plan that was read from a file has widths for packets alone.
    if (!saving.site.choice) need.bits = 0;
  }
  const auto made = derived(*value, need);
  if (!made) {
    learn_cut(saving, *value, need);
    return std::nullopt;
  }
  value->saved = true;
  made->save(tensor.storage());
  Ledger& ledger = book(saving);
  ledger.unique_bytes += saving.first ? static_cast<std::int64_t>(tensor.storage().nbytes()) : 0;
  const Effort& effort = made->effort();
  const std::int64_t instead = known ? 0 : effort.instead();
  if (instead > 0) made->charge(hold_bytes(saving, instead));
  saving.site.runs_products = effort.products > 0;
  const bool by_products = effort.products > 0 || effort.of_products;
  if (by_products) saving.site.last_step = saving.step;
  if (saving.site.runs_products && !known)
    ledger.remade_bytes += static_cast<std::int64_t>(tensor.storage().nbytes());
  describe(ledger, Kind::kDerived, effort.rounded ? effort.bits : 0, "made again", instead);
  note_recipe(ledger, *made, saving.bytes);
  note_spared(saving, *value, effort, instead);
  // A source that a plan has left unfolded may have a packet in the next.
  std::vector<Site*> roots = made->roots();
  for (const auto& [kept, leaf] : effort.leaves)
    if (auto* site = const_cast<Site*>(leaf.site);
        site && is_unfolded_by_choice(*site, saving.step))
      if (std::find(roots.begin(), roots.end(), site) == roots.end()) roots.push_back(site);
  if (effort.of_products && roots.empty() && !need.exact) {
    c10::SmallVector<Site*, 2> packets;
    add_packets_instead(*value, packets);
    roots.assign(packets.begin(), packets.end());
  }
  note_roots(saving.site, roots);
  if (effort.of_products && need.exact) {
    saving.site.derived = false;
    add_products(*value, saving.site.exact_by);
  }
  if (saving.site.root || by_products) {
    saving.site.floor = std::max(saving.site.floor, saving.demand.bits);
    count_packet(ledger.apart, tensor, tensor.numel());
  }
  return saved(saving, view_in_span(tensor, 0), made, false);
}

}  // namespace backfold::torch_layer
