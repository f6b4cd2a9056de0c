// SPDX-License-Identifier: Apache-2.0
//
// The variance of the gradient from step to step, to compare the folding error with.
//
// Two consecutive steps make a pair. Both read the same coordinates, and half the squared
// difference is an unbiased estimate of their variance. Unlike a variance about a running mean, it
// is not affected by the mean drifting during training.
//
//   parameters   a pair reads up to 16 on each device, the next pair the next ones, in a shuffled
//                order, so that every parameter gets its turn, however small it is
//   coordinates  up to 256 of a parameter, different ones in every turn (gradient_sketch.h)
//   steps        all of them until each parameter had a turn (at least 16 pairs), then one pair in
//                8 steps; estimates fade by 1/e while the number of steps grows by a quarter, or
//                in 256 steps later on
//
// The total is the sum over parameters of their own estimates, unbiased if steps are independent.
// It is that of the gradients as they arrive, so it includes the noise of folding and the factor of
// a scaled loss. Each step launches one small kernel per parameter read, each pair 13 more per
// device, and outside of pairs each parameter costs one call that does nothing. Nothing waits for a
// device.

#ifndef BACKFOLD_TORCH_PLAN_GUARD_H_
#define BACKFOLD_TORCH_PLAN_GUARD_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "torch/plan/gradient_sketch.h"

namespace backfold::torch_layer {

class Guard {
 public:
  // Watches what backward adds to the .grad of those `parameters` that are dense, real leaves and
  // require gradients. The seed and the sizes alone decide which coordinates are read.
  Guard(const std::vector<at::Tensor>& parameters, std::uint64_t seed);
  // Removes its hooks. No backward may be running.
  ~Guard();
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

  // Gradients that arrive from now on, on any thread, belong to a new step. Those of several
  // backwards add up. A step in which none arrives does not count.
  void begin_step();

  // While on, arriving gradients are not those of the user's training and are ignored.
  void pause(bool on);

  // None until 8 pairs were seen and half of the coordinates had their turn; the others are taken
  // to equal the mean of those. Parameters whose gradients cannot be read (sparse ones, subclasses)
  // are left out, and turns with a gradient that is not finite do not count. Waits for the devices.
  std::optional<GradientMoments> moments() const;

  // Everything but the parameters and the seed. A guard of the same parameters and seed that loads
  // it continues bit for bit. For any other, load() raises ValueError and changes nothing. Both
  // wait for the devices.
  SketchState state() const;
  void load(const SketchState& state);

 private:
  struct Watched {
    at::Tensor parameter;
    std::shared_ptr<GradientSketch> sketch;
    std::int64_t row;
  };

  static void hang_hook(const Watched& watched);
  void finish_step();
  void start_pair();

  std::vector<std::shared_ptr<GradientSketch>> sketches_;  // one for each device
  std::vector<Watched> watched_;
  std::int64_t fingerprint_ = 0;  // of sizes and seed
  std::int64_t dense_pairs_ = 0;  // the first pairs, which follow each other without a gap
  std::int64_t steps_ = 0;
  std::int64_t pairs_ = 0;
  std::int64_t next_pair_ = 0;  // the first step at which it may begin
  int phase_ = -1;              // 0 and 1 in the steps of a pair, -1 between pairs
};

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PLAN_GUARD_H_
