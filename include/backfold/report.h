// SPDX-License-Identifier: Apache-2.0
//
// What a step kept for backward: where, how, and why.

#ifndef BACKFOLD_REPORT_H_
#define BACKFOLD_REPORT_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace backfold {

// One place that saves tensors. Sizes are in bytes.
struct ReportRow {
  std::string module;  // path of the module, empty outside of all modules
  std::string op;      // "aten::addmm"
  std::string slot;    // argument of the operator, or "result.0" for its first result
  int occurrence = 0;  // among the saves of this op and slot in one call of the module
  std::int64_t saves = 0;
  std::int64_t saved_bytes = 0;      // that autograd alone would keep, counting every save
  std::int64_t unique_bytes = 0;     // the same, counting memory only for its first save
  std::int64_t held_bytes = 0;       // on its device now, without memory that is alive anyway
  std::int64_t offloaded_bytes = 0;  // kept in host memory, or a file, instead
  std::int64_t duplicate_bytes = 0;  // covered by what an earlier save kept
  std::string kind;                  // "lossy", "predicate", "alive", ...; of the largest save
  std::int64_t elements = 0;         // that its packets hold
  int bits = 0;                      // of a code
  double stored_bits = 0;            // per element, headers included
  std::string layout;                // of the groups: "flat", "rotated", "strided 1", "strided 2"
  std::string estimate;              // how its sensitivity was found: "re-run", "closed form", ...
  double error = 0;                  // expected error energy that it adds to the gradient
  // The same for all that read its packets, or are made from them, if these had 4 bits; 0 where
  // that was not measured.
  double sensitivity = 0;
  std::string reason;
  // Of a tensor that is made again (in inspect(): could be): the operators, the last one first,
  // the place that saved what it is made from, and the bytes that are read and written for it.
  std::string recipe;
  std::string source;
  std::int64_t moved_bytes = 0;
  std::int64_t transient_bytes = 0;  // allocated beside the tensor while it is made, at most
  // What making it again spares, not in inspect(): bytes that are not held, and the time that a
  // device takes to copy as much as packing and unpacking would move, less moved_bytes. Negative
  // where that is more.
  std::int64_t spared_bytes = 0;
  double spared_ms = 0;
};

// What the last plan expects.
struct ReportPlan {
  std::int64_t step = 0;        // after which it was made
  std::int64_t sites = 0;       // places measured
  std::int64_t held_bytes = 0;  // on the device, in the largest step
  std::int64_t sent_bytes = 0;  // besides, offloaded: a budget is not kept without
  double mean_bits = 0;         // of a code, over the elements of lossy tensors
  double error = 0;             // error energy added to the gradient
  double uniform_error = 0;     // the same with one width everywhere that takes no more memory
  bool raised = false;          // beyond the target, at which the gradient would drown in noise
  // Places kept unfolded whatever the target, because rounding them would have added more energy
  // to the gradient than it has itself.
  std::vector<std::string> kept;
  std::optional<std::int64_t> peak_bytes;  // taken at once, for a target of the peak
};

// What the last plan makes again by running matrix products, convolutions and attention.
struct ReportRemade {
  std::int64_t places = 0;
  std::int64_t bytes = 0;       // that are not held for it
  std::int64_t held_bytes = 0;  // that the plan expects on the device
  std::int64_t sent_bytes = 0;  // and offloaded, where tensors are exact
  double ms = 0;                // that these products took when they ran first
};

// What was kept for backward in the course of the step, from event to event: a tensor is saved,
// read or let go. Sizes are in bytes and include what earlier steps left behind. What compiled
// graphs keep is not part of it.
struct ReportTimeline {
  struct Event {
    std::int64_t site = -1;  // among the report's rows; -1 for one of an earlier step
    bool backward = false;
    std::int64_t plain_bytes = 0;  // that autograd alone would keep
    std::int64_t held_bytes = 0;   // held instead, on the device
    std::int64_t made_bytes = 0;   // decoded or made again for the operation that runs now
  };
  std::int64_t events_seen = 0;  // of which `events` are some, always with the peaks
  std::int64_t carried_plain_bytes = 0, carried_held_bytes = 0;  // when the step began
  std::vector<Event> events;
  // Where each curve is highest, among the events; the third is held_bytes + made_bytes.
  std::size_t plain_peak = 0, held_peak = 0, folded_peak = 0;
};

// Plans and readings of the noise so far, of this process. Of many, older ones are thinned out.
struct ReportHistory {
  struct Plan {
    std::int64_t step = 0;  // after which it was made
    std::int64_t held_bytes = 0;
    double mean_bits = 0, error = 0, uniform_error = 0;  // as in ReportPlan
    std::optional<double> gradient_energy;               // of the pass that was measured
  };
  struct Noise {
    std::int64_t step = 0;
    double ratio = 0;  // as Report::noise
  };
  std::vector<Plan> plans;
  std::vector<Noise> noise;
};

// Of the JSON of a report. Grows by one when a field that is read changes its meaning or goes.
inline constexpr std::int64_t kReportFormat = 1;

struct Report {
  std::int64_t step = 0;
  bool folded = true;  // false if nothing was packed, only counted
  // Sums over all rows except parameters.
  std::int64_t saved_bytes = 0, unique_bytes = 0, held_bytes = 0, alive_bytes = 0;
  std::int64_t offloaded_bytes = 0;
  std::int64_t spared_bytes = 0;
  double spared_ms = 0;
  // Allocated between the beginning and the end of the block, beyond what is held: tensors hidden
  // from autograd (attributes of a custom function's ctx), and results that stay alive.
  std::optional<std::int64_t> unseen_bytes;
  // Allocated at most on the model's device since the program last reset that; none on a CPU.
  std::optional<std::int64_t> device_peak_bytes;
  std::optional<ReportPlan> plan;
  std::optional<ReportRemade> remade;  // of a budget or ratio
  // The error that the plan expects / the gradient's own variance from step to step, when last
  // estimated.
  std::optional<double> noise;
  std::vector<ReportRow> rows;  // largest first
  std::optional<ReportTimeline> timeline;
  ReportHistory history;

  // A table that fits a terminal, by module and operator. At most `rows` lines; 0 means all.
  std::string text(std::size_t rows = 30) const;

  // Everything, place by place, largest first, in bytes; null for numbers that are not finite.
  std::string json() const;

  // A report from what json() wrote, without timeline and history: what text() shows. Raises
  // ValueError if it is not that, or of another format.
  static Report from_json(std::string_view text);
};

}  // namespace backfold

#endif  // BACKFOLD_REPORT_H_
