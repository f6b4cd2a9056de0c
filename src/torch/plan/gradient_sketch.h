// SPDX-License-Identifier: Apache-2.0
//
// The gradients of one device's parameters at a few coordinates, in pairs of steps.
//
// Each parameter is a row. Rows of up to 256 elements are read in full, longer ones at every s-th
// element from a random start that changes with each turn, so that each element is drawn with
// probability 1/s and counts s times. s shares no factor with the length of a slice along the first
// dimension, or the draw would stay in a few columns.
//
// Rows take turns: pair p reads those of group p modulo groups(). The result of a turn, the squared
// differences of the pair's two steps, stays on the device as a mean over turns, by row. A turn
// weighs as much as the steps it stands for, and old turns fade.

#ifndef BACKFOLD_TORCH_PLAN_GRADIENT_SKETCH_H_
#define BACKFOLD_TORCH_PLAN_GRADIENT_SKETCH_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

namespace backfold::torch_layer {

// Moments of one step's gradient, over all coordinates.
struct GradientMoments {
  double variance = 0;  // sum of the variances
  double energy = 0;    // mean of the squared norm
};

// Sums over rows.
struct SketchTotals {
  GradientMoments moments;
  double seen = 0;       // elements of rows that had a turn
  double watchable = 0;  // elements of all rows that are not left out
};

// The state of a sketch, as plain numbers.
struct SketchState {
  std::vector<std::int64_t> counters;
  std::vector<double> values;
};

// add() may be called by any thread at any time, everything else by one thread at a time.
class GradientSketch {
 public:
  struct Row {
    std::int64_t numel = 0;
    std::int64_t stride = 1;  // from one sampled coordinate to the next
    bool left_out = false;    // its last gradient could not be read
  };
  static Row row_of(const at::Tensor& parameter);

  GradientSketch(at::Device device, std::vector<Row> rows, std::uint64_t seed);

  std::int64_t groups() const { return groups_; }
  bool has_turn(std::int64_t row) const { return row >= first_row() && row < end_row(); }

  void start_pair(std::int64_t pair);
  // Which step of the pair the following gradients belong to: 0, 1, or -1 for neither.
  void watch(int phase);
  void pause(bool on) { paused_ = on; }
  bool is_watching() const { return phase_ >= 0 && !paused_; }
  // Adds the gradient of a row, on the current stream. Never raises.
  void add(std::int64_t row, const at::Tensor& gradient);
  // Whether the gradient of any row arrived since the last call.
  bool take_arrived() { return arrived_.exchange(false); }
  void finish_pair(std::int64_t step);

  void add_to(SketchTotals& totals);
  void append_to(SketchState& state);
  // Reads what append_to() wrote, and moves past it.
  void load(std::int64_t pair, const std::int64_t*& counter, const double*& value);

 private:
  struct Quiet;
  struct Work;
  struct Access;

  std::int64_t count() const { return static_cast<std::int64_t>(rows_.size()); }
  std::int64_t first_row() const { return count() * (pair_ % groups_) / groups_; }
  std::int64_t end_row() const { return count() * (pair_ % groups_ + 1) / groups_; }
  void add_sample(std::int64_t row, const at::Tensor& gradient);
  void follow_earlier_work();
  std::vector<double> host_copy(const at::Tensor& numbers);

  const at::Device device_;
  const std::uint64_t seed_;
  std::vector<Row> rows_;
  const std::int64_t groups_;
  std::vector<std::int64_t> last_turns_;  // step of each group's last turn
  at::Tensor memory_;                     // holds the next two
  at::Tensor sums_;                       // weights, squared differences, squares; by row
  at::Tensor samples_;                    // the pair's two steps; by row of the group
  std::optional<c10::Stream> stream_;     // with the last work on them
  std::int64_t pair_ = 0;
  std::int64_t void_rows_ = 0;  // bit per row of the group: not counted in this pair
  std::mutex mutex_;
  std::atomic<int> phase_{-1};
  std::atomic<bool> paused_{false};
  std::atomic<bool> arrived_{false};
};

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PLAN_GRADIENT_SKETCH_H_
