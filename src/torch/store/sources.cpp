// SPDX-License-Identifier: Apache-2.0
//
// What a tensor can be made again from.
//
// A chain of recipes leads from a tensor to what is kept: packets and references of earlier saves,
// parameters, and memory that is still alive and smaller. It is bounded in operators, large
// sources, bytes allocated on the way and bytes moved: where a packet of its own would be made and
// read in half the time, a tensor has one, unless the user asked for a number of bytes.
//
// Products are links of a chain only where the plan marked the site that saved the tensor. Such a
// tensor is made once for all its readers in backward, so for others it is a source like a packet:
// chains end there, and what they take together is the plan's business (plan/remaking.h).

#include <algorithm>

#include "torch/reads/recipes.h"
#include "torch/store/store.h"

namespace backfold::torch_layer {
namespace {

// GPT-2's GELU, written out by hand under autocast, takes ten.
constexpr std::size_t kMostOperations = 12;
constexpr std::int64_t kMostBytesMoved = 64;  // times the bytes of the tensor
// The same for rounded tensors, one kernel after the other, where time counts as much as bytes.
// Packing and unpacking a tensor moves 2.5 times its bytes.
constexpr std::int64_t kWorthItsTime = 6;
// Large ones. A product has two; each residual connection that a chain runs through adds one.
constexpr int kMostSources = 2;
// Tensors, of the chain's largest, that may be alive at once while the result is made, which may be
// the narrowest of them.
constexpr std::int64_t kMostAtOnce = 3;
// The same for chains with products: attention has three large arguments, and perhaps a mask.
constexpr std::size_t kMostOperationsOfProduct = 24;
constexpr int kMostSourcesOfProduct = 4;
constexpr std::int64_t kMostAtOnceOfProduct = 6;

// Whether what is positive can be told from a packet. Other readers of the same tensor may have
// left other bits.
bool tells_positive(const Format& format) {
  if (const auto* group = std::get_if<GroupFormat>(&format)) return group->zero_exact;
  const auto* predicate = std::get_if<PredicateFormat>(&format);
  return predicate && predicate->type != ElementType::kBool &&
         predicate->comparison == Comparison::kGreater && predicate->low == 0;
}

}  // namespace

std::int64_t Effort::instead() const {
  std::int64_t bytes = 0;
  for (const auto& [kept, leaf] : leaves) bytes += leaf.instead ? leaf.bytes : 0;
  return bytes;
}

std::int64_t Effort::moved_for(std::int64_t result) const {
  if (!rounded || !one_pass) return bytes_moved;
  std::int64_t bytes = result;
  for (const auto& [kept, leaf] : leaves) bytes += leaf.packed > 0 ? leaf.packed : leaf.bytes;
  return bytes;
}

std::int64_t Effort::transient_for(std::int64_t result) const {
  if (!rounded || !one_pass) return peak - result;
  // One packet is decoded into the result; others are made first.
  std::int64_t others = 0, most = 0;
  for (const auto& [kept, leaf] : leaves) {
    if (leaf.packed == 0) continue;
    others += leaf.bytes;
    most = std::max(most, leaf.bytes);
  }
  return others - most;
}

void Effort::add_leaf(const void* kept, const Leaf& leaf) {
  const bool known =
      std::any_of(leaves.begin(), leaves.end(), [&](const auto& one) { return one.first == kept; });
  if (!known) leaves.emplace_back(kept, leaf);
}

void Effort::add(const Effort& other) {
  operators.append(other.operators.begin(), other.operators.end());
  bytes_moved += other.bytes_moved;
  for (const auto& [kept, leaf] : other.leaves) add_leaf(kept, leaf);
  rounded |= other.rounded;
  one_pass &= other.one_pass;
  bits = std::min(bits, other.bits);
  products += other.products;
  of_products |= other.of_products;
  for (const auto& lap : other.laps)
    if (std::find(laps.begin(), laps.end(), lap) == laps.end()) laps.push_back(lap);
}

std::optional<Source> Store::own_bits(const Value& value) {
  const auto bits_of = [](const Value& of, const View& view) -> std::optional<Source> {
    for (const Tracked::Packed& known : of.home->packets) {
      const auto packet = known.packet.lock();
      if (!packet || known.write != of.write || !tells_positive(packet->format())) continue;
      if (auto in_packet = packet->view_of(view))
        return Source{packet, std::move(*in_packet), of.type, {}, 0};
    }
    return std::nullopt;
  };
  if (auto of_result = bits_of(value, value.view)) return of_result;
  const Value::Input& input = value.inputs[0];
  return bits_of(*input.value, input.view);
}

std::optional<Source> Store::kept_source(const Value::Input& input, const Need& need,
                                         Effort& effort) {
  Tracked& home = *input.value->home;
  const std::int64_t bytes = bytes_of(input.view, input.type);
  if (input.value->is_current()) {
    if (const auto hold = home.hold.lock(); hold && hold->version() == input.value->version) {
      effort.add_leaf(hold.get(), Effort::Leaf{bytes, false, home.site});
      return Source{hold, input.view, input.type, input.counter, input.position};
    }
  }
  for (const Tracked::Packed& known : home.packets) {
    const auto packet = known.packet.lock();
    if (!packet || known.write != input.value->write || packet->type() != input.type) continue;
    auto view = packet->view_of(input.view);
    if (!view) continue;
    if (const auto* predicate = std::get_if<PredicateFormat>(&packet->format());
        packet->is_of_shares() || (predicate && predicate->type != ElementType::kBool))
      continue;  // made for its own reader
    if (!is_lossless(packet->format())) {
      const auto* group = std::get_if<GroupFormat>(&packet->format());
      if (need.exact || !packet->is_planned() || (need.rows && !keeps_rows(*packet, *need.rows)))
        continue;
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
    effort.add_leaf(packet.get(),
                    Effort::Leaf{size, false, &packet->site(), packed_bytes(packet->format())});
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
    effort.add_leaf(hold.get(), Effort::Leaf{bytes, true, home.site});
    return Source{hold, view_in_copy(given, copy), input.type, {}, input.position};
  }
  const auto bytes = static_cast<std::int64_t>(alive->nbytes());
  if (!value.parameter && bytes > need.instead) return std::nullopt;
  auto hold = std::make_shared<Hold>(c10::Storage(std::move(alive)), value.version, nullptr);
  hold->pin();
  if (!value.parameter) {
    home.hold = hold;
    offer(hold, need.reader, &home);
    effort.add_leaf(hold.get(), Effort::Leaf{bytes, true, home.site});
  }
  return Source{std::move(hold), input.view, input.type, input.counter, input.position};
}

std::optional<Source> Store::source_of(const Value::Input& input, const Need& need,
                                       Effort& effort) {
  if (auto kept = kept_source(input, need, effort)) return kept;
  Value& value = *input.value;
  if (need.if_stored && value.saved && value.home->site)
    if (const auto made = value.derived.lock()) {
      auto& stored = *need.if_stored;
      Site* const first = value.home->site;
      const auto is_first = [&](const auto& one) { return one.first == first; };
      if (std::none_of(stored.begin(), stored.end(), is_first))
        stored.emplace_back(first, made->bytes());
      effort.add_leaf(made.get(), Effort::Leaf{made->bytes(), false, first});
      return Source{made, input.view, input.type, {}, input.position};
    }
  if (value.op && value.type == input.type) {
    const bool known = !value.derived.expired();
    Need of_value = need;
    of_value.exact |= need.rows.has_value();
    of_value.rows.reset();
    if (auto made = derived(value, of_value)) {
      Effort below = made->effort();
      if (below.products > 0 && value.saved) {
        effort.add_leaf(made.get(), Effort::Leaf{made->bytes(), false, value.home->site});
        effort.rounded |= below.rounded;
        effort.of_products = true;
        effort.one_pass = false;
        effort.bits = std::min(effort.bits, below.bits);
        return Source{std::move(made), input.view, input.type, {}, input.position};
      }
      // A product is run once, however often the chain comes by.
      if (value.op->product) {
        below.operators.assign(1, value.op);
        below.bytes_moved = 0;
      }
      below.bytes_moved = below.moved_for(bytes_of(value.view, value.type));
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
  sources.reserve(value.inputs.size());
  effort.operators.push_back(&op);
  effort.one_pass &= op.recipe->fused != Recipe::Fused::kNone;
  effort.products += op.product;
  if (value.lap) effort.laps.push_back(value.lap);
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
  effort.peak = effort.largest = bytes;
  std::int64_t made = 0;  // bytes of the sources so far
  for (const std::size_t i : by_what_they_take(sources)) {
    const Allocated allocated = allocated_for(sources[i]);
    effort.peak = std::max(effort.peak, made + allocated.peak);
    effort.largest = std::max(effort.largest, allocated.largest);
    made += allocated.bytes;
  }
  effort.peak = std::max(effort.peak, made + bytes);
  effort.bytes_moved += bytes;
  const auto large = std::count_if(effort.leaves.begin(), effort.leaves.end(),
                                   [&](const auto& one) { return 4 * one.second.bytes > bytes; });
  const bool products = effort.products > 0;
  const bool hurries = effort.rounded && !effort.one_pass && !options_.bytes_first;
  const bool affordable =
      effort.operators.size() <= (products ? kMostOperationsOfProduct : kMostOperations) &&
      large <= (products ? kMostSourcesOfProduct : kMostSources) &&
      (products || effort.bytes_moved <= (hurries ? kWorthItsTime : kMostBytesMoved) * bytes) &&
      bytes + effort.transient_for(bytes) <=
          (products ? kMostAtOnceOfProduct : kMostAtOnce) * effort.largest &&
      effort.instead() <= need.instead;
  return affordable ? std::move(sources) : std::vector<Source>();
}

}  // namespace backfold::torch_layer
