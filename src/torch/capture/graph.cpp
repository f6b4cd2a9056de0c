// SPDX-License-Identifier: Apache-2.0

#include "torch/capture/graph.h"

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

// The width that is asked for before anything was seen. A budget in bytes asks for none: graphs
// then have the default, and the plan of all other places meets the rest.
int width_wanted(const Target& target) {
  switch (target.kind) {
    case Target::Kind::kBits:
      return widest_within(target.value);
    case Target::Kind::kRatio:
      return widest_within(32 / target.value - 0.25);
    case Target::Kind::kBudget:
      break;
  }
  return 4;
}

}  // namespace

int GraphRules::width(std::int64_t bytes, int floor) const {
  TORCH_CHECK(bits, "backfold: bits=None has no width");
  Demand demand;
  demand.bits = floor;
  if (floor > 0) demand.reads = Reads::kFinely;
  const WidthRules rules{.bits = bits, .adaptive = spares_small, .spares_small = spares_small};
  return width_of(Site(), demand, bytes, rules).choice->bits;
}

std::optional<GraphRules> graph_rules(const State& state) {
  const auto& target = state.planning.target;
  if (state.options.observe_only || !state.policy.empty() || state.probing.owns_blocks())
    return std::nullopt;
  return GraphRules{.bits = target ? width_wanted(*target) : state.options.bits,
                    .spares_small = target && target->kind == Target::Kind::kBits,
                    .min_bytes = state.options.min_bytes};
}

at::Tensor Entry::fold_in_graph(const at::Tensor& dense, const Format& format,
                                const GraphPlace& place) {
  Site& site = graph_site(place.module, place.name);
  count_save(dense);
  const std::int64_t step = state_->blocks.steps;
  at::Tensor payload = pack_payload(dense, format, store_.next_key(site, step));
  Ledger& ledger = ledger_of(site, step);
  const auto bytes = static_cast<std::int64_t>(dense.nbytes());
  const auto held = static_cast<std::int64_t>(payload.nbytes());
  ledger.saves += 1;
  ledger.saved_bytes += bytes;
  ledger.unique_bytes += bytes;
  ledger.held_bytes += held;
  ledger.elements += dense.numel();
  const auto* group = std::get_if<GroupFormat>(&format);
  const Kind kind = !group ? Kind::kBits : group->zero_exact ? Kind::kZeroExact : Kind::kLossy;
  describe(ledger, kind, code_bits(format), "", held);
  return payload;
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

Site& Entry::graph_site(std::string_view module, std::string_view name) {
  const auto known = state_->model.paths.find(std::string(module));
  const std::uint32_t path = known == state_->model.paths.end() ? 0 : known->second;
  return state_->sites->graph_site(path, module, name);
}

at::Tensor fold_in_graph(const at::Tensor& dense, const Format& format, const GraphPlace& place) {
  Entry* entry = Entry::current();
  TORCH_CHECK(entry,
              "backfold: a graph that was compiled inside of a Controller's block runs outside of "
              "one; enter the block, or call torch.compiler.reset()");
  return entry->fold_in_graph(dense, format, place);
}

void keep_in_graph(const at::Tensor& tensor, const GraphPlace& place, std::string_view reason) {
  if (Entry* entry = Entry::current()) entry->keep_in_graph(tensor, place, reason);
}

}  // namespace backfold::torch_layer
