// SPDX-License-Identifier: Apache-2.0

#include "backfold/report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <unordered_map>

#include "torch/bandwidth.h"
#include "torch/capture/entry.h"
#include "torch/device_memory.h"
#include "torch/plan/bundles.h"

namespace backfold {
namespace {

std::string mebibytes(std::int64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f", static_cast<double>(bytes) / (1 << 20));
  return text;
}

// As wide as a column of sizes.
std::string padded(const std::string& text) {
  return std::string(text.size() < 9 ? 9 - text.size() : 0, ' ') + text;
}

// At most `width` characters. The end is kept, as it tells paths apart.
std::string shortened(const std::string& text, std::size_t width) {
  return text.size() <= width ? text : "~" + text.substr(text.size() - width + 1);
}

// Sites of one module and operator. `how` is that of the site that holds most.
struct Line {
  std::string module, op;
  std::int64_t saves = 0, saved = 0, unique = 0, held = 0, offloaded = 0;
  double spared_ms = 0;
  std::pair<std::int64_t, std::int64_t> largest = {-1, -1};
  std::string how;
};

constexpr std::size_t kModuleWidth = 24, kOperatorWidth = 24, kHowWidth = 40;

std::string how_of(const ReportRow& row) {
  std::string how = row.kind;
  if (row.kind == "lossy" || row.kind == "zero-exact") {
    char text[32];
    std::snprintf(text, sizeof text, " %d (%.2f)", row.bits, row.stored_bits);
    how += text;
  }
  if (row.kind == "derived")
    how += ": by " + row.recipe;
  else if (!row.reason.empty())
    how += ": " + row.reason;
  else if (!row.recipe.empty())  // an inspection
    how += ": made again by " + row.recipe;
  return how;
}

// How many milliseconds of copying a step has less, or more.
std::string spared(double ms) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3f ms %s", std::abs(ms), ms < 0 ? "more" : "less");
  return text;
}

std::string how_of(const Line& line) {
  std::string how = line.how;
  if (how.starts_with("derived:") && line.spared_ms != 0)
    how.insert(std::strlen("derived"), ", " + spared(line.spared_ms));
  return how.size() <= kHowWidth ? how : how.substr(0, kHowWidth - 1) + "~";
}

std::string without_namespace(const std::string& op) {
  return op.starts_with("aten::") ? op.substr(6) : op;
}

}  // namespace

std::string Report::text(std::size_t limit) const {
  std::map<std::pair<std::string, std::string>, Line> grouped;
  for (const ReportRow& row : rows) {
    Line& line = grouped[{row.module, row.op}];
    line.module = row.module;
    line.op = without_namespace(row.op);
    line.saves += row.saves;
    line.saved += row.saved_bytes;
    line.unique += row.unique_bytes;
    line.held += row.held_bytes;
    line.offloaded += row.offloaded_bytes;
    line.spared_ms += row.spared_ms;
    const std::pair size(row.held_bytes + row.offloaded_bytes, row.saved_bytes);
    if (size > line.largest) {
      line.largest = size;
      line.how = how_of(row);
    }
  }
  std::vector<Line> lines;
  for (auto& [name, line] : grouped) lines.push_back(std::move(line));
  std::sort(lines.begin(), lines.end(), [](const Line& a, const Line& b) {
    return std::tuple(b.held + b.offloaded, b.unique, b.saved, a.module, a.op) <
           std::tuple(a.held + a.offloaded, a.unique, a.saved, b.module, b.op);
  });

  char text[256];
  std::string out;
  const bool offloads = offloaded_bytes > 0;  // otherwise a column of zeros
  const auto add_line = [&](const std::string& module, const std::string& op, const char* saves,
                            const std::string& saved, const std::string& unique,
                            const std::string& held, const std::string& offloaded,
                            const std::string& how) {
    std::snprintf(text, sizeof text, "%-*s %-*s %5s %9s %9s %9s%s%s  %s\n",
                  static_cast<int>(kModuleWidth), shortened(module, kModuleWidth).c_str(),
                  static_cast<int>(kOperatorWidth), shortened(op, kOperatorWidth).c_str(), saves,
                  saved.c_str(), unique.c_str(), held.c_str(), offloads ? " " : "",
                  offloads ? padded(offloaded).c_str() : "", how.c_str());
    out += text;
  };
  add_line("module", "operator", "saves", "saved", "unique", folded ? "held" : "kept", "offloaded",
           "how, bits (stored): why");
  const std::size_t shown = limit == 0 ? lines.size() : std::min(limit, lines.size());
  for (std::size_t i = 0; i < shown; ++i) {
    const Line& line = lines[i];
    add_line(line.module, line.op, std::to_string(line.saves).c_str(), mebibytes(line.saved),
             mebibytes(line.unique), mebibytes(line.held), mebibytes(line.offloaded), how_of(line));
  }
  if (shown < lines.size())
    out += "... and " + std::to_string(lines.size() - shown) + " more lines\n";
  if (plan) {
    std::snprintf(text, sizeof text,
                  "plan of step %lld: %lld places measured, %.2f bits per code on average, %s MiB "
                  "expected; error energy %.3g, or %.3g with one width everywhere\n",
                  static_cast<long long>(plan->step), static_cast<long long>(plan->sites),
                  plan->mean_bits, mebibytes(plan->held_bytes).c_str(), plan->error,
                  plan->uniform_error);
    out += text;
    if (plan->sent_bytes > 0)
      out += "and " + mebibytes(plan->sent_bytes) + " MiB offloaded, as the budget needs\n";
    if (plan->peak_bytes)
      out += "expected at the peak of a step: " + mebibytes(*plan->peak_bytes) + " MiB\n";
  }
  if (remade && remade->sent_bytes > 0)
    out += "offloaded, as the budget needs: " + mebibytes(remade->sent_bytes) + " MiB\n";
  if (remade && remade->places > 0) {
    std::snprintf(text, sizeof text,
                  "products run again for %lld places: %s MiB less held, %.3f ms more in a step\n",
                  static_cast<long long>(remade->places), mebibytes(remade->bytes).c_str(),
                  remade->ms);
    out += text;
  }
  if (noise) {
    std::snprintf(text, sizeof text, "folding error / gradient variance: %.3g\n", *noise);
    out += text;
  }
  if (spared_bytes != 0) {
    out += "derived tensors: " + mebibytes(spared_bytes) + " MiB less held, " + spared(spared_ms) +
           " of copying in a step\n";
  }
  std::snprintf(text, sizeof text,
                "step %lld, MiB: autograd alone saves %s (%s unique, %s of it alive anyway), %s %s",
                static_cast<long long>(step), mebibytes(saved_bytes).c_str(),
                mebibytes(unique_bytes).c_str(), mebibytes(alive_bytes).c_str(),
                folded ? "held now" : "kept by autograd alone", mebibytes(held_bytes).c_str());
  out += text;
  if (offloads) out += ", offloaded " + mebibytes(offloaded_bytes);
  if (unseen_bytes) out += "; allocated but not seen here " + mebibytes(*unseen_bytes);
  return out;
}

namespace torch_layer {
namespace {

// 0 where the device has no memory to find out how fast it copies.
double spared_ms(const Ledger& ledger) {
  if (!ledger.device) return 0;
  const std::int64_t bytes = ledger.spared_moves - ledger.moved_bytes;
  const std::optional<double> speed = copy_bandwidth(*ledger.device);
  return speed ? 1e3 * static_cast<double>(bytes) / *speed : 0;
}

using Placed = std::pair<ReportRow, const Site*>;

std::optional<ReportTimeline> timeline_of(const State& state, const std::vector<Placed>& rows) {
  const Timeline::Recorded recorded = state.timeline->recorded();
  if (recorded.events == 0 || recorded.step != state.blocks.steps) return std::nullopt;
  std::unordered_map<const Site*, std::int64_t> places;
  for (const auto& [row, site] : rows) places.emplace(site, places.size());
  ReportTimeline timeline{.events_seen = recorded.events,
                          .carried_plain_bytes = recorded.carried_plain,
                          .carried_held_bytes = recorded.carried_held,
                          .events = {}};
  for (const Timeline::Event& event : recorded.kept) {
    const std::size_t index = timeline.events.size();
    if (event.number == recorded.most_plain.number) timeline.plain_peak = index;
    if (event.number == recorded.most_held.number) timeline.held_peak = index;
    if (event.number == recorded.most_folded.number) timeline.folded_peak = index;
    const auto place = places.find(event.site);
    timeline.events.push_back({place == places.end() ? -1 : place->second, event.backward,
                               event.plain, event.held, event.made});
  }
  return timeline;
}

}  // namespace

Report report_of(const State& state) {
  Report report;
  std::vector<Placed> rows;
  report.step = state.blocks.steps;
  report.folded = !state.options.observe_only;
  if (state.offloader) state.offloader->settle();
  std::unordered_map<const Site*, double> sensitivities;
  const Marked marked = marked_now(*state.sites);
  for (const Bundle& bundle : bundles_of(*state.sites, state.blocks.steps, marked))
    sensitivities.emplace(bundle.root, bundle.error(4));
  std::int64_t seen = 0;
  for (const Site& site : state.sites->sites()) {
    const Ledger& ledger = site.ledger;
    if (ledger.step != state.blocks.steps || ledger.saves == 0) continue;
    seen += ledger.held_bytes;
    ReportRow row;
    row.module = state.sites->path(site.path).name;
    row.op = site.op->name;
    row.slot = site.slot;
    row.occurrence = site.occurrence;
    row.saves = ledger.saves;
    row.saved_bytes = ledger.saved_bytes;
    row.unique_bytes = ledger.unique_bytes;
    row.offloaded_bytes = ledger.away ? ledger.away->left.load() : 0;
    row.held_bytes = ledger.held_bytes - row.offloaded_bytes;
    row.duplicate_bytes = ledger.duplicate_bytes;
    Kind kind = ledger.kind;
    // Whether a tensor that an observed site saved stays alive is known only after the block.
    if (!report.folded && kind == Kind::kRaw && site.alive) {
      kind = Kind::kAlive;
      row.held_bytes = 0;
    }
    row.kind = name_of(kind);
    row.elements = ledger.elements;
    row.bits = ledger.bits;
    row.layout = name_of(ledger.grouping);
    row.estimate = name_of(site.sensitivity.estimate);
    row.error = error_at(site.sensitivity, site.choice ? site.choice->bits : ledger.bits);
    if (const auto found = sensitivities.find(&site); found != sensitivities.end())
      row.sensitivity = found->second;
    if (ledger.elements > 0)
      row.stored_bits =
          8.0 * static_cast<double>(ledger.held_bytes) / static_cast<double>(ledger.elements);
    row.reason = ledger.reason;
    for (const Operator* op : ledger.recipe)
      row.recipe += (row.recipe.empty() ? "" : ", ") + without_namespace(op->name);
    if (ledger.source) row.source = ledger.source->name;
    row.moved_bytes = ledger.moved_bytes;
    row.transient_bytes = ledger.transient_bytes;
    row.spared_bytes = ledger.spared_bytes;
    row.spared_ms = spared_ms(ledger);
    if (ledger.remade_bytes > 0 && site.remaking) row.spared_ms -= site.remaking->ms;
    report.spared_bytes += row.spared_bytes;
    report.spared_ms += row.spared_ms;
    if (kind != Kind::kParameter) {
      report.saved_bytes += row.saved_bytes;
      report.unique_bytes += row.unique_bytes;
      report.held_bytes += row.held_bytes;
      report.offloaded_bytes += row.offloaded_bytes;
      report.alive_bytes += kind == Kind::kAlive ? row.unique_bytes : 0;
    }
    rows.emplace_back(std::move(row), &site);
  }
  report.plan = state.planning.plan;
  report.remade = state.planning.remade;
  report.noise = state.guarding.noise;
  report.history = state.history;
  if (state.blocks.grown_bytes)
    report.unseen_bytes = std::max<std::int64_t>(0, *state.blocks.grown_bytes - seen);
  if (const auto memory = device_memory(state.blocks.device))
    report.device_peak_bytes = memory->peak;
  std::sort(rows.begin(), rows.end(), [](const Placed& one, const Placed& other) {
    const ReportRow &a = one.first, &b = other.first;
    return std::tuple(b.held_bytes + b.offloaded_bytes, b.unique_bytes, b.saved_bytes, a.module,
                      a.op, a.slot) < std::tuple(a.held_bytes + a.offloaded_bytes, a.unique_bytes,
                                                 a.saved_bytes, b.module, b.op, b.slot);
  });
  report.timeline = timeline_of(state, rows);
  for (Placed& placed : rows) report.rows.push_back(std::move(placed.first));
  return report;
}

}  // namespace torch_layer
}  // namespace backfold
