// SPDX-License-Identifier: Apache-2.0
//
// What a step kept for backward: where, how, and why.

#ifndef BACKFOLD_REPORT_H_
#define BACKFOLD_REPORT_H_

#include <cstdint>
#include <optional>
#include <string>
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
  int bits = 0;                      // of a code
  double stored_bits = 0;            // per element, headers included
  std::string layout;                // of the groups: "flat", "rotated", "strided 1", "strided 2"
  std::string estimate;              // how its sensitivity was found: "re-run", "closed form", ...
  double error = 0;                  // expected error energy that it adds to the gradient
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
  std::int64_t held_bytes = 0;  // in the largest step
  double mean_bits = 0;         // of a code, over the elements of lossy tensors
  double error = 0;             // error energy added to the gradient
  double uniform_error = 0;     // the same with one width everywhere that takes no more memory
  bool raised = false;          // beyond the target, at which the gradient would drown in noise
  // Places kept unfolded whatever the target, because rounding them would have added more energy
  // to the gradient than it has itself.
  std::vector<std::string> kept;
};

// What the last plan makes again by running matrix products, convolutions and attention.
struct ReportRemade {
  std::int64_t places = 0;
  std::int64_t bytes = 0;       // that are not held for it
  std::int64_t held_bytes = 0;  // that the plan expects
  double ms = 0;                // that these products took when they ran first
};

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
  std::optional<ReportPlan> plan;
  std::optional<ReportRemade> remade;  // of a budget or ratio
  // The error that the plan expects / the gradient's own variance from step to step, when last
  // estimated.
  std::optional<double> noise;
  std::vector<ReportRow> rows;  // largest first

  // A table that fits a terminal, by module and operator. At most `rows` lines; 0 means all.
  std::string text(std::size_t rows = 30) const;

  // Everything, place by place, largest first, in bytes; null for numbers that are not finite.
  std::string json() const;
};

}  // namespace backfold

#endif  // BACKFOLD_REPORT_H_
