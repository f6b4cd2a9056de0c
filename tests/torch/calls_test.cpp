// SPDX-License-Identifier: Apache-2.0

#include "torch/capture/calls.h"

#include <ATen/Functions.h>
#include <ATen/ThreadLocalState.h>
#include <gtest/gtest.h>

#include <string>
#include <thread>

namespace backfold::torch_layer {
namespace {

constexpr int kNested = 40;

thread_local int nested = 0;
thread_local int moved = 0;
thread_local int checked = 0;

// What a pack hook or a probe does: it holds the running call and calls operators.
void call_operators(const RunningCall& call) {
  if (nested == kNested || call.op->name != "aten::neg") return;
  ++nested;
  at::neg(at::ones({1}));
  --nested;
  ++checked;
  moved += running_call() != &call;
}

TEST(Calls, StayWhereTheyAreWhileOperatorsRunInsideThem) {
  // A growing vector moves them: each of its six or seven steps leaves a reference dangling.
  std::thread([] {
    const CallWatch watch;
    observe_calls(call_operators, nullptr);
    at::neg(at::ones({1}));
    observe_calls(nullptr, nullptr);
    EXPECT_GE(checked, kNested);
    EXPECT_EQ(moved, 0);
  }).join();
}

thread_local std::string name_before, name_after;

void call_another(const RunningCall& call, c10::ArrayRef<c10::IValue>) {
  if (nested > 0 || call.op->name != "aten::neg") return;
  ++nested;
  name_before = call.op->name;
  at::abs(at::ones({1}));
  name_after = call.op->name;
  --nested;
}

TEST(Calls, AreWhatTheyWereWhileTheirEndIsObserved) {
  const CallWatch watch;
  observe_calls(nullptr, call_another);
  at::neg(at::ones({1}));
  observe_calls(nullptr, nullptr);
  EXPECT_EQ(name_before, "aten::neg");
  EXPECT_EQ(name_after, "aten::neg");  // "aten::ones" if the slot was given to the next call
  EXPECT_EQ(running_call(), nullptr);
}

thread_local int writes = 0;

TEST(Calls, OfAKernelAreSeenOnceAndSkippedThen) {
  std::thread([] {
    const CallWatch watch;
    const at::Tensor x = at::ones({4, 4});
    observe_writes([](const at::Tensor&) { ++writes; });
    const auto writes_of = [](const auto& call) {
      writes = 0;
      call();
      return writes;
    };
    const auto copy = [&] { x.to(at::kBFloat16); };  // to -> _to_copy -> copy_
    EXPECT_EQ(writes_of(copy), 1);
    EXPECT_EQ(writes_of(copy), 0);
    EXPECT_EQ(writes_of([&] { x.neg_(); }), 1);
    // Composed operators stay open: what they call, autograd sees.
    const auto composed = [&] { at::dropout(x, 0.5, true); };  // calls bernoulli_ and div_
    EXPECT_GE(writes_of(composed), 2);
    EXPECT_EQ(writes_of(composed), 2);
    observe_writes(nullptr);
  }).join();
}

TEST(Calls, AreSeenAgainAfterAKernelThatFailed) {
  std::thread([] {
    const CallWatch watch;
    const at::Tensor x = at::ones({4, 4});
    observe_writes([](const at::Tensor&) { ++writes; });
    for (int i = 0; i < 3; ++i) {
      x.to(at::kBFloat16);
      EXPECT_THROW(x.gather(0, at::ones({2, 2}, at::kFloat)), c10::Error);
      EXPECT_THROW(x.copy_(at::ones({3})), c10::Error);
      writes = 0;
      x.neg_();
      EXPECT_EQ(writes, 1);
    }
    observe_writes(nullptr);
  }).join();
}

TEST(Calls, AreNobodysBusinessWhileUnwatched) {
  const CallWatch watch;
  static thread_local int seen = 0;
  seen = 0;
  observe_calls([](const RunningCall&) { ++seen; },
                [](const RunningCall&, c10::ArrayRef<c10::IValue>) { ++seen; });
  const at::Tensor ones = at::ones({1});
  const int before = seen;
  {
    const Unwatched outer;
    const Unwatched inner;
    at::neg(ones);
  }
  EXPECT_EQ(seen, before);
  EXPECT_EQ(running_call(), nullptr);
  at::neg(ones);
  EXPECT_GT(seen, before);
  observe_calls(nullptr, nullptr);
}

TEST(Calls, OnThreadsThatTakeOverAWatchAreLeftAlone) {
  // As the engine's threads do where backward runs inside a watch.
  std::thread([] {
    const CallWatch watch;
    const at::ThreadLocalState state;
    testing::internal::CaptureStderr();
    std::thread([&] {
      const at::ThreadLocalStateGuard guard(state);
      const at::Tensor x = at::ones({4, 4});
      for (int i = 0; i < 3; ++i) x.to(at::kBFloat16);
    }).join();
    EXPECT_EQ(testing::internal::GetCapturedStderr(), "");  // "Requested callback is not found"
  }).join();
}

}  // namespace
}  // namespace backfold::torch_layer
