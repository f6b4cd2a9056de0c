// SPDX-License-Identifier: Apache-2.0
//
// Which tensors are made again, and from what.
//
// A chain of recipes leads from a tensor to what is kept: packets and references of earlier saves,
// parameters, and memory that is still alive and smaller. It is bounded in operators, bytes moved
// and large sources; making a tensor again may still cost several times what decoding a packet of
// its own would.

#include <algorithm>

#include "torch/reads/recipes.h"
#include "torch/store/saving.h"

namespace backfold::torch_layer {
namespace {

// GPT-2's GELU, written out by hand under autocast, takes ten.
constexpr std::size_t kMostOperations = 12;
constexpr std::int64_t kMostBytesMoved = 64;  // times the bytes of the tensor
// Large ones. A product has two; each residual connection that a chain runs through adds one.
constexpr int kMostSources = 2;

Span span_of(const View& view) {
  std::int64_t last = 0;
  for (std::size_t i = 0; i < view.sizes.size(); ++i) {
    if (view.sizes[i] == 0) return {view.offset, 0};
    last += (view.sizes[i] - 1) * view.strides[i];
  }
  return {view.offset, last + 1};
}

bool same(const View& a, const View& b) {
  return a.offset == b.offset && a.sizes == b.sizes && a.strides == b.strides;
}

std::int64_t bytes_of(const View& view, at::ScalarType type) {
  return c10::multiply_integers(view.sizes) * static_cast<std::int64_t>(c10::elementSize(type));
}

// Without the dimensions that repeat memory.
View without_repeats(View view) {
  for (std::size_t i = 0; i < view.sizes.size(); ++i)
    if (view.strides[i] == 0) view.sizes[i] = 1;
  return view;
}

// Whether rounding lent no row of a norm the noise of another.
bool keeps_rows(const SharedPacket& packet, const std::optional<NormRows>& rows) {
  if (!rows) return true;
  const auto* group = std::get_if<GroupFormat>(&packet.format());
  if (!group) return false;
  if (!mixes(*group, *rows)) return true;
  const NormRows* known = packet.rows();
  return known && known->run == rows->run && known->count == rows->count;
}

// Where a view of a storage lies in a packet of it; none where the packet does not hold all of it.
std::optional<View> view_in_packet(const SharedPacket& packet, const View& view) {
  if (packet.is_copy()) {
    if (!same(view, *packet.original())) return std::nullopt;
    return packet.packed_view();
  }
  if (!packet.span().contains(span_of(view))) return std::nullopt;
  View inside = view;
  inside.offset -= packet.span().begin;
  return inside;
}

void note_recipe(Ledger& ledger, const Effort& effort) {
  ledger.recipe = effort.operators;
  ledger.moved_bytes += effort.bytes_moved;
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

std::optional<Source> Store::own_bits(const Value& value) {
  for (const Tracked::Packed& known : value.home->packets) {
    const auto packet = known.packet.lock();
    if (!packet || known.write != value.write) continue;
    const auto* predicate = std::get_if<PredicateFormat>(&packet->format());
    const auto* group = std::get_if<GroupFormat>(&packet->format());
    const bool signs =
        (predicate && predicate->type != ElementType::kBool) || (group && group->zero_exact);
    if (!signs) continue;
    if (auto view = view_in_packet(*packet, value.view))
      return Source{packet, std::move(*view), value.type, {}, 0};
  }
  return std::nullopt;
}

std::optional<Source> Store::kept_source(const Value::Input& input, const Need& need,
                                         Effort& effort) {
  Tracked& home = *input.value->home;
  const std::int64_t bytes = bytes_of(input.view, input.type);
  if (input.value->is_current()) {
    if (const auto hold = home.hold.lock(); hold && hold->version() == input.value->version) {
      effort.leaves.try_emplace(hold.get(), Effort::Leaf{bytes, false, home.site});
      return Source{hold, input.view, input.type, input.counter, input.position};
    }
  }
  for (const Tracked::Packed& known : home.packets) {
    const auto packet = known.packet.lock();
    if (!packet || known.write != input.value->write || packet->type() != input.type) continue;
    auto view = view_in_packet(*packet, input.view);
    if (!view) continue;
    if (const auto* predicate = std::get_if<PredicateFormat>(&packet->format());
        predicate && predicate->type != ElementType::kBool)
      continue;  // made for its own reader
    if (!is_lossless(packet->format())) {
      const auto* group = std::get_if<GroupFormat>(&packet->format());
      if (need.exact || !packet->is_planned() || !keeps_rows(*packet, need.rows)) continue;
      if (group && group->bits < need.bits) {
        // More bits for all of a source are worth it for a reader of its size.
        if (options_.adaptive && 2 * need.bytes >= bytes)
          packet->site().served_floor = std::max(packet->site().served_floor, need.bits);
        continue;
      }
      effort.rounded = true;
      effort.bits = std::min(effort.bits, code_bits(packet->format()));
    }
    const std::int64_t size =
        is_lossless(packet->format()) ? packed_bytes(packet->format()) : bytes;
    effort.leaves.try_emplace(packet.get(), Effort::Leaf{size, false, &packet->site()});
    return Source{packet, std::move(*view), input.type, {}, input.position};
  }
  return std::nullopt;
}

// Memory that is alive and would go: kept instead of the tensor, where it is the smaller.
std::optional<Source> Store::source_instead(const Value::Input& input, const Need& need,
                                            Effort& effort) {
  const Value& value = *input.value;
  if (!value.is_current() || input.counter.moved()) return std::nullopt;
  Tracked& home = *value.home;
  auto alive = home.storage.lock();
  if (!alive) return std::nullopt;
  // A buffer, or whatever is outside of the graph, is the program's to change, through .data or
  // NumPy as well, where no count tells. So it is copied, if it is small.
  if (value.buffer || !value.in_graph) {
    const std::int64_t bytes = bytes_of(without_repeats(input.view), input.type);
    if (bytes > std::min(need.instead, need.bytes / 16)) return std::nullopt;
    const at::Tensor given = tensor_at(c10::Storage(std::move(alive)), input.view, input.type);
    const at::Tensor copy = without_gaps(given);
    const auto hold = std::make_shared<Hold>(copy.storage(), 0, nullptr);
    hold->pin();
    effort.leaves.try_emplace(hold.get(), Effort::Leaf{bytes, true, home.site});
    return Source{hold, view_in_copy(given, copy), input.type, {}, input.position};
  }
  const auto bytes = static_cast<std::int64_t>(alive->nbytes());
  if (!value.parameter && bytes > need.instead) return std::nullopt;
  auto hold = std::make_shared<Hold>(c10::Storage(std::move(alive)), value.version, nullptr);
  hold->pin();
  if (!value.parameter) {
    home.hold = hold;
    effort.leaves.try_emplace(hold.get(), Effort::Leaf{bytes, true, home.site});
  }
  return Source{std::move(hold), input.view, input.type, input.counter, input.position};
}

std::optional<Source> Store::source_of(const Value::Input& input, const Need& need,
                                       Effort& effort) {
  if (auto kept = kept_source(input, need, effort)) return kept;
  Value& value = *input.value;
  if (value.op && value.type == input.type) {
    const bool known = !value.derived.expired();
    Need of_value = need;
    of_value.exact |= need.rows.has_value();
    of_value.rows.reset();
    if (auto made = derived(value, of_value)) {
      Effort below = made->effort();
      for (auto& [kept, leaf] : below.leaves) leaf.instead &= !known;
      effort.add(below);
      return Source{std::move(made), input.view, input.type, {}, input.position};
    }
  }
  return source_instead(input, need, effort);
}

// One for each input of the value; none at all where one is missing.
std::vector<Source> Store::sources_of(const Value& value, const Need& need, Effort& effort) {
  const Operator& op = *value.op;
  const auto arguments = static_cast<int>(value.arguments.size());
  std::vector<Source> sources;
  effort.operators.push_back(&op);
  for (const Value::Input& input : value.inputs) {
    Need of_input = need;
    of_input.exact |= input.position >= arguments ||
                      std::find(op.exact.begin(), op.exact.end(), input.position) != op.exact.end();
    if (op.recipe->on_rounded == Recipe::OnRounded::kStatistics && input.position == op.norm_slot)
      if (const auto call = norm_call(*op.norm, Call(*op.schema, value.arguments)))
        of_input.rows = rows_of(*call, input.view.sizes, input.view.strides);
    auto source = source_of(input, of_input, effort);
    if (!source) return {};
    sources.push_back(std::move(*source));
    effort.bytes_moved += bytes_of(input.view, input.type);
  }
  const std::int64_t bytes = bytes_of(value.view, value.type);
  effort.bytes_moved += bytes;
  const auto large = std::count_if(effort.leaves.begin(), effort.leaves.end(),
                                   [&](const auto& one) { return 4 * one.second.bytes > bytes; });
  const bool affordable = effort.operators.size() <= kMostOperations && large <= kMostSources &&
                          effort.bytes_moved <= kMostBytesMoved * bytes &&
                          effort.instead() <= need.instead;
  return affordable ? std::move(sources) : std::vector<Source>();
}

std::shared_ptr<Derived> Store::derived(Value& value, const Need& need) {
  if (auto known = value.derived.lock()) {
    const Effort& effort = known->effort();
    if (!effort.rounded || (!need.exact && effort.bits >= need.bits)) return known;
  }
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
  const auto made = std::make_shared<Derived>(std::move(making), std::move(effort), need.reader);
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
  // Beside tensors of a few bits, only what is small is worth a reference.
  return {.exact = raw || norm,
          .bits = raw || norm ? 0 : choice->bits,
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
  const auto found = storages_.find(tensor.storage().unsafeGetStorageImpl());
  return found == storages_.end() ? at::Tensor() : copied(found->second);
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
  // It was made for this reader, norms included.
  const auto made = derived(
      *tracked.value,
      {.exact = false, .bits = 0, .bytes = saving.bytes, .instead = 0, .reader = saving.site});
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

std::shared_ptr<Derived> Store::derivation_of(const at::Tensor& tensor, const Site& site) {
  const auto found = storages_.find(tensor.storage().unsafeGetStorageImpl());
  Value* value = found == storages_.end() ? nullptr : found->second.value;
  if (!value || !value->op || value->type != tensor.scalar_type()) return nullptr;
  return derived(*value, {.exact = true,
                          .bits = 0,
                          .bytes = saved_bytes(tensor),
                          .instead = saved_bytes(tensor) / 16,
                          .reader = site});
}

Saved Store::observe(Saving& saving, Tracked& tracked) {
  // Before it is held itself, which would be the shortest way.
  const auto made = derivation_of(saving.tensor, saving.site);
  Saved held = hold(saving, tracked, Kind::kRaw, saving.demand.reason);
  if (made) note_recipe(saving.site.ledger, made->effort());
  return held;
}

bool Store::is_derivable(const Saving& saving, const Tracked& tracked) {
  const Value* value = tracked.value;
  if (saving.demand.reads != Reads::kPredicate || !value || !value->op ||
      value->version != saving.tensor._version())
    return false;
  Need need = need_of(saving);
  need.bits = 0;  // what the values need is known when they are read
  Effort effort;
  return !sources_of(*value, need, effort).empty();
}

std::optional<Saved> Store::derive(Saving& saving, Tracked& tracked) {
  const at::Tensor& tensor = saving.tensor;
  Value* value = tracked.value;
  const bool reads_values = saving.demand.reads == Reads::kValues ||
                            saving.demand.reads == Reads::kFinely ||
                            saving.demand.reads == Reads::kExactly;
  if (!value || !value->op || !reads_values || !Policy::is_planned(saving.rule) ||
      value->version != tensor._version() || value->type != tensor.scalar_type())
    return std::nullopt;
  const bool known = !value->derived.expired();
  const auto made = derived(*value, need_of(saving));
  if (!made) return std::nullopt;
  made->save(tensor.storage());
  Ledger& ledger = book(saving);
  ledger.unique_bytes += saving.first ? static_cast<std::int64_t>(tensor.storage().nbytes()) : 0;
  const Effort& effort = made->effort();
  const std::int64_t instead = known ? 0 : effort.instead();
  ledger.held_bytes += instead;
  describe(ledger, Kind::kDerived, effort.rounded ? effort.bits : 0, "made again", instead);
  note_recipe(ledger, effort);
  note_roots(saving.site, made->roots());
  if (saving.site.root) saving.site.floor = std::max(saving.site.floor, saving.demand.bits);
  return saved(saving, view_in_span(tensor, 0), made, false);
}

}  // namespace backfold::torch_layer
