// SPDX-License-Identifier: Apache-2.0

#include "torch/capture/calls.h"

#include <ATen/Functions.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include <algorithm>
#include <functional>
#include <string>
#include <thread>
#include <vector>

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

thread_local std::vector<const void*> written;

// Where the tensors are that a call is seen to write, without gradients.
std::vector<const void*> written_by(const std::function<void()>& call) {
  const at::NoGradGuard no_grad;
  const CallWatch watch;
  observe_writes(
      [](const at::Tensor& tensor) { written.push_back(tensor.storage().unsafeGetStorageImpl()); });
  written.clear();
  call();
  observe_writes(nullptr);
  return written;
}

TEST(Calls, WithoutGradientsStillTellOfWrites) {
  const at::Tensor x = at::ones({4, 4}), y = at::ones({4, 4}), mean = at::zeros({4}),
                   var = at::ones({4}), gradient = at::ones({4, 4});
  const auto writes = [](const at::Tensor& tensor, const std::function<void()>& call) {
    const auto seen = written_by(call);
    return std::count(seen.begin(), seen.end(), tensor.storage().unsafeGetStorageImpl());
  };
  for (int i = 0; i < 3; ++i) {  // what a kernel calls is seen at first, and skipped then
    EXPECT_GE(writes(x, [&] { x.add_(1); }), 1);
    EXPECT_GE(writes(x, [&] { x.copy_(y); }), 1);
    EXPECT_GE(writes(x, [&] { x.view({16}).slice(0, 2).zero_(); }), 1);
    EXPECT_GE(writes(y, [&] { at::_foreach_add_({x, y}, 1); }), 1);
    EXPECT_GE(writes(y, [&] { at::add_out(const_cast<at::Tensor&>(y), x, x); }), 1);
    EXPECT_GE(writes(x, [&] { x.index_put_({at::ones({4, 4}, at::kBool)}, at::ones({})); }), 1);
    const auto norm = [&] { at::batch_norm(x, {}, {}, mean, var, true, 0.1, 1e-5, false); };
    EXPECT_GE(writes(mean, norm), 1);  // a schema that says it writes nothing
    EXPECT_GE(writes(var, norm), 1);
    EXPECT_EQ(
        writes(x, [&] { at::_fused_sgd_({x}, {gradient}, {}, 0, 0, 0.1, 0, false, false, true); }),
        1);
    EXPECT_EQ(writes(x, [&] { at::add(x, y); }), 0);
  }
}

TEST(Calls, WithoutGradientsStillTellOfDecisionsAndCopies) {
  static thread_local int decisions, copies;
  const at::NoGradGuard no_grad;
  const CallWatch watch;
  const at::Tensor x = at::ones({4, 4}), mask = x > 0, places = at::zeros({2}, at::kLong);
  observe_decisions([] { ++decisions; });
  observe_copies([](const at::Tensor& source, const at::Tensor& copy) {
    copies += source.scalar_type() == at::kFloat && copy.scalar_type() == at::kBFloat16;
  });
  for (int i = 0; i < 3; ++i) {
    decisions = copies = 0;
    at::nonzero(x);
    EXPECT_GE(decisions, 1);
    decisions = 0;
    x.index({mask});
    EXPECT_GE(decisions, 1);
    decisions = 0;
    x.index({places});
    EXPECT_EQ(decisions, 0);
    x.to(at::kBFloat16);
    EXPECT_EQ(copies, 1);
  }
  observe_decisions(nullptr);
  observe_copies(nullptr);
}

thread_local std::size_t tensors_inside = 0, arguments_inside = 0;

at::Tensor look_inside(const at::Tensor& x, double) {
  tensors_inside = running_call()->tensors.size();
  return x.clone();
}

TORCH_LIBRARY(backfold_calls_test, library) {
  library.def("inside(Tensor x, float number) -> Tensor", look_inside);
}

TEST(Calls, WithoutGradientsAreKnownToWhoMaySaveInside) {
  // An operator of another library may turn gradients on again, and save what it was given.
  const auto inside = c10::Dispatcher::singleton()
                          .findSchemaOrThrow("backfold_calls_test::inside", "")
                          .typed<at::Tensor(const at::Tensor&, double)>();
  const at::NoGradGuard no_grad;
  const CallWatch watch;
  tensors_inside = 0;
  inside.call(at::ones({4}), 1);
  EXPECT_EQ(tensors_inside, 1);
}

TEST(Calls, WithoutGradientsAreShownToObservers) {
  const at::NoGradGuard no_grad;
  const CallWatch watch;
  arguments_inside = 0;
  observe_calls([](const RunningCall& call) { arguments_inside = call.arguments.size(); }, nullptr);
  at::neg(at::ones({4}));
  observe_calls(nullptr, nullptr);
  EXPECT_EQ(arguments_inside, 1);
  EXPECT_EQ(running_call(), nullptr);
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
