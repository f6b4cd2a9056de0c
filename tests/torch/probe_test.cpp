// SPDX-License-Identifier: Apache-2.0
//
// A probe that accompanies the user's step while memory runs out.

#include "torch/probe/probe.h"

#include <ATen/Functions.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>

#include "torch/probe/effect.h"

namespace backfold::torch_layer {
namespace {

// The CPU's allocator, whose n-th allocation from now fails; 0 for none.
class ShortMemory : public c10::Allocator {
 public:
  ShortMemory() : real_(c10::GetCPUAllocator()) { c10::SetCPUAllocator(this, kPriority); }
  ~ShortMemory() override { c10::SetCPUAllocator(real_, kPriority); }

  c10::DataPtr allocate(std::size_t bytes) override {
    if (countdown_ > 0 && --countdown_ == 0) {
      failed_ = true;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "no memory for this");
    }
    return real_->allocate(bytes);
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    real_->copy_data(to, from, bytes);
  }

  void fail_at(int n) {
    countdown_ = n;
    failed_ = false;
  }
  bool failed() const { return failed_; }

 private:
  static constexpr std::uint8_t kPriority = 100;
  c10::Allocator* const real_;
  int countdown_ = 0;
  bool failed_ = false;
};

struct Step {
  explicit Step(bool model_runs_again) {
    op.name = "aten::exp";
    call.op = &op;
    x = at::randn({64, 64}).requires_grad_();
    result = x.exp();
    site = &sites.site(0, op, 0, 0);
    site->reference.elements = x.numel();
    probe->begin(Probe::Pass::kUsersOwn);
    if (model_runs_again) probe->outside().expect_model();
  }

  std::shared_ptr<StandIn> note() { return probe->note(result, *site, Demand(), call); }

  Operator op;
  RunningCall call;
  SiteTable sites;
  Site* site = nullptr;
  at::Tensor x, result;
  std::shared_ptr<Probe> probe = std::make_shared<Probe>(0, 1e-3, 1);
};

TEST(Probe, LeavesTheStepAloneWhereMemoryIsShort) {
  for (const bool model_runs_again : {false, true}) {
    int failures = 0;
    for (int n = 1;; ++n) {
      Step step(model_runs_again);
      ShortMemory memory;
      memory.fail_at(n);
      EXPECT_NO_THROW(EXPECT_EQ(step.note() != nullptr, model_runs_again)) << "allocation " << n;
      const bool failed = memory.failed();
      memory.fail_at(0);
      step.probe->call_ended(step.call, std::vector<c10::IValue>{step.result});
      step.result.sum().backward();
      step.probe->finish_own(0, {}, 1e-3, {});
      // A table of only some widths would be read as a complete one.
      const std::size_t widths = step.probe->widths(*step.site, *step.site).size();
      const std::size_t measured = step.site->sensitivity.errors.size();
      EXPECT_TRUE(measured == widths || (failed && measured == 0)) << "allocation " << n;
      if (!failed) break;
      ++failures;
    }
    EXPECT_GE(failures, 5);  // a norm, and for each width a packet, a tensor, their difference
  }
}

TEST(Probe, LeavesBackwardAloneWhereMemoryIsShort) {
  Step step(false);
  step.note();
  EffectHook hook(step.probe, *step.result.grad_fn(), nullptr);
  const std::vector<at::Tensor> gradients{at::ones({64, 64})};
  ShortMemory memory;
  memory.fail_at(1);
  std::vector<at::Tensor> sent;
  EXPECT_NO_THROW(sent = hook(gradients, gradients));
  EXPECT_TRUE(memory.failed());
  ASSERT_EQ(sent.size(), 1);
  EXPECT_TRUE(sent[0].is_same(gradients[0]));
}

}  // namespace
}  // namespace backfold::torch_layer
