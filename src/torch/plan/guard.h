// SPDX-License-Identifier: Apache-2.0
//
// The variance of the gradient from step to step, which the error of folding is weighed against.
//
// Two steps in a row make a pair. Both look at the same coordinates, and half of the squared
// difference estimates their variance without bias. That the mean moves in the course of training
// does not enter, as it would in a variance about a running mean.
//
//   parameters   a pair looks at up to 16 on each device, the next pair at the next ones, in a
//                shuffled order: the turn of every parameter comes, however small it is
//   coordinates  up to 256 of a parameter, others in every turn (gradient_sketch.h)
//   steps        all until each parameter had a turn (16 pairs at least), then a pair in 8 steps;
//                what was found fades by 1/e while the number of steps grows by a quarter, or in
//                256 steps later on
//
// The total is the sum over parameters of what their own turns found: unbiased, where steps are
// independent. It is that of the gradients as they arrive, so the noise of folding is in it, and
// the factor of a scaled loss. It costs one small kernel per parameter that is looked at and step,
// 13 per pair and device, and a call per parameter that does nothing in other steps. Nothing waits
// for a device.

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
  // Watches what backward adds to the .grad of `parameters`, but for those that are no dense, real
  // leaves which require gradients. The seed and the sizes alone decide what is looked at.
  Guard(const std::vector<at::Tensor>& parameters, std::uint64_t seed);
  // Takes its hooks away. No backward may be running.
  ~Guard();
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

  // Gradients that arrive from now on, on any thread, belong to a new step; those of several
  // backwards add up. A step in which none arrived does not count.
  void begin_step();

  // While on, gradients that arrive are not the user's and are passed over.
  void pause(bool on);

  // None until 8 pairs were seen and half of the coordinates had their turn; those that had none
  // yet count like the mean of the others. Parameters whose gradients cannot be looked at (sparse
  // ones, subclasses) are left out; a turn in which a gradient was not finite does not count. Waits
  // for the devices.
  std::optional<GradientMoments> moments() const;

  // Everything but the parameters and the seed. A guard of the same parameters and seed that loads
  // it goes on bit for bit; for any other, load() raises ValueError and changes nothing. Both wait
  // for the devices.
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
  std::int64_t dense_pairs_ = 0;  // the first ones, which follow each other without a gap
  std::int64_t steps_ = 0;
  std::int64_t pairs_ = 0;
  std::int64_t next_pair_ = 0;  // the step with which it may begin
  int phase_ = -1;              // 0 and 1 in the steps of a pair, -1 between pairs
};

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PLAN_GUARD_H_
