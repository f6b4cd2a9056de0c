// SPDX-License-Identifier: Apache-2.0

#include "torch/capture/graph.h"

#include <algorithm>
#include <functional>
#include <mutex>
#include <set>

#include "torch/capture/entry.h"
#include "torch/store/saving.h"

namespace backfold::torch_layer {
namespace {

// A ledger keeps no text of its own. There are few reasons.
const char* lasting(std::string_view reason) {
  static std::mutex& mutex = *new std::mutex;
  static auto& reasons = *new std::set<std::string, std::less<>>;
  const std::lock_guard lock(mutex);
  auto found = reasons.find(reason);
  if (found == reasons.end()) found = reasons.emplace(reason).first;
  return found->c_str();
}

std::uint64_t hash_of(const GraphPlace& place) {
  constexpr std::hash<std::string_view> hash;
  return scramble(hash(place.module)) ^ hash(place.name);
}

// The plan's choice for a site, or what the options say; floors hold in any case: a table is of
// small errors.
Choice choice_for(const Site& site, const GraphDemand& demand, std::int64_t bytes,
                  const WidthRules& rules) {
  Demand read;
  read.bits = demand.floor;
  if (demand.floor > 0) read.reads = Reads::kFinely;
  Choice choice = *width_of(site, read, bytes, rules).choice;
  choice.bits = std::max({choice.bits, demand.floor, demand.zero_exact ? 2 : 1});
  choice.codec = -1;
  return choice;
}

// None for what is kept as it is.
std::optional<Format> format_for(const at::Tensor& dense, const GraphDemand& demand,
                                 const Choice& choice) {
  const auto type = element_type(dense.scalar_type());
  const auto least = std::min<std::int64_t>(16, 8 * dense.element_size() - 1);
  if (demand.exact || !type || choice.bits > least) return std::nullopt;
  Format format = group_format(dense, *type, choice, demand.zero_exact);
  set_count(format, dense.numel());
  const auto bytes = static_cast<std::int64_t>(dense.nbytes());
  return packed_bytes(format) < bytes ? std::optional(format) : std::nullopt;
}

}  // namespace

std::optional<GraphRules> graph_rules(const State& state) {
  if (state.options.observe_only || !state.policy.empty() || state.probing.owns_blocks())
    return std::nullopt;
  const bool adaptive = state.planning.target.has_value();
  return GraphRules{.rounds = adaptive || state.options.bits,
                    .measures = adaptive && !state.model.sharded,
                    .offloads = state.offloading == State::Offloading::kEverything,
                    .min_bytes = state.options.min_bytes};
}

bool is_mostly_compiled(const State& state) {
  std::int64_t compiled = 0, all = 0;
  for (const Site& site : state.sites->sites()) {
    const std::int64_t elements =
        site.last_step == state.blocks.steps ? site.reference.elements : 0;
    all += elements;
    if (site.op && site.op->compiled) compiled += elements;
  }
  return 2 * compiled > all;
}

std::shared_ptr<GraphPacket> Entry::fold_in_graph(const at::Tensor& dense,
                                                  const GraphDemand& demand,
                                                  const GraphPlace& place) {
  Site& site = graph_site(place.module, place.name);
  count_save(dense);
  const std::int64_t step = state_->blocks.steps;
  const auto bytes = static_cast<std::int64_t>(dense.nbytes());
  Kind kind = Kind::kRaw;
  Grouping grouping;
  std::optional<Format> format;
  if (dense.scalar_type() == at::kBool) {
    format = PredicateFormat{.type = ElementType::kBool, .count = dense.numel()};
    kind = Kind::kBits;
  } else if (!demand.exact) {
    Choice choice = choice_for(site, demand, bytes, store_.options());
    if (state_->probing.running) choice.grouping = {};  // as probe/graphs.h reads them
    format = format_for(dense, demand, choice);
    grouping = choice.grouping;
    if (format) kind = demand.zero_exact ? Kind::kZeroExact : Kind::kLossy;
  }
  const auto packet = std::make_shared<GraphPacket>(dense, format, store_.next_key(site, step),
                                                    site, state_->sites);
  Ledger& ledger = ledger_of(site, step);
  ledger.saves += 1;
  ledger.saved_bytes += bytes;
  ledger.unique_bytes += bytes;
  ledger.held_bytes += packet->bytes();
  ledger.elements += format ? dense.numel() : 0;
  describe(ledger, kind, format ? code_bits(*format) : 0,
           kind != Kind::kRaw ? ""
           : demand.exact     ? "sent away as it is"
                              : "kept exact by the plan",
           packet->bytes(), grouping);
  packet->charge({state_->timeline, site, Timeline::Curve::kHeld, packet->bytes()},
                 {state_->timeline, site, Timeline::Curve::kPlain, bytes});
  state_->timeline->saved(site);
  if (!demand.exact && kind != Kind::kBits) {
    site.zero_exact = demand.zero_exact;
    site.floor = std::max(site.floor, demand.floor);
    site.last_step = step;
    count_packet(ledger.lossy, dense, dense.numel());
  }
  if (state_->probing.running && place.graph > 0) {
    const std::int64_t run = graph_runs_[hash_of(place) ^ scramble(place.graph)]++;
    packet->watch(state_->probing.running->graphs(), place.graph | run << 32);
  }
  if (const auto passage = store_.way_out(site)) packet->leave(*passage);
  return packet;
}

void Entry::keep_in_graph(const at::Tensor& tensor, const GraphPlace& place,
                          std::string_view reason) {
  Site& site = graph_site(place.module, place.name);
  count_save(tensor);
  Ledger& ledger = ledger_of(site, state_->blocks.steps);
  const std::int64_t bytes = saved_bytes(tensor);
  ledger.saves += 1;
  ledger.saved_bytes += bytes;
  ledger.unique_bytes += bytes;
  ledger.held_bytes += bytes;
  describe(ledger, Kind::kRaw, 0, lasting(reason), bytes);
}

// One graph may serve several places of the model, which run in the same order in every step.
Site& Entry::graph_site(std::string_view module, std::string_view name) {
  const auto known = state_->model.paths.find(std::string(module));
  const std::uint32_t path = known == state_->model.paths.end() ? 0 : known->second;
  constexpr int kMost = 63;  // so that a loop of any length has a bounded number of names
  const int run = std::min(graph_runs_[hash_of({0, module, name})]++, kMost);
  return state_->sites->graph_site(path, module, name, run);
}

std::shared_ptr<GraphPacket> fold_in_graph(const at::Tensor& dense, const GraphDemand& demand,
                                           const GraphPlace& place) {
  Entry* entry = Entry::current();
  TORCH_CHECK(entry,
              "backfold: a graph that was compiled inside of a Controller's block runs outside of "
              "one; enter the block, or call torch.compiler.reset()");
  return entry->fold_in_graph(dense, demand, place);
}

void keep_in_graph(const at::Tensor& tensor, const GraphPlace& place, std::string_view reason) {
  if (Entry* entry = Entry::current()) entry->keep_in_graph(tensor, place, reason);
}

}  // namespace backfold::torch_layer
