// SPDX-License-Identifier: Apache-2.0

#include "torch/codec/reused_memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

namespace backfold::torch_layer {
namespace {

constexpr std::size_t kBytes = 4 << 20;

TEST(ReusedMemory, ComesBackForTheSameSize) {
  const ReusedMemoryUser user;
  void* first = reused_memory().allocate(kBytes).get();
  EXPECT_EQ(bytes_kept_for_reuse(), kBytes);
  const c10::DataPtr second = reused_memory().allocate(kBytes - 100);
  EXPECT_EQ(second.get(), first);
  EXPECT_EQ(bytes_kept_for_reuse(), 0);
}

TEST(ReusedMemory, IsNotWastedOnMuchSmallerTensors) {
  const ReusedMemoryUser user;
  void* large = reused_memory().allocate(kBytes).get();
  const c10::DataPtr small = reused_memory().allocate(kBytes / 2);
  EXPECT_NE(small.get(), large);
  EXPECT_EQ(bytes_kept_for_reuse(), kBytes);
}

TEST(ReusedMemory, LeavesSmallBlocksToMalloc) {
  const ReusedMemoryUser user;
  reused_memory().allocate(kReusedFrom - 1);
  EXPECT_EQ(bytes_kept_for_reuse(), 0);
}

TEST(ReusedMemory, GoesBackWhenStepsDoNotNeedIt) {
  const ReusedMemoryUser user;
  { const auto block = reused_memory().allocate(kBytes); }
  for (int step = 0; step < 4; ++step) {
    age_reused_memory();
    EXPECT_EQ(bytes_kept_for_reuse(), kBytes) << step;
  }
  age_reused_memory();
  EXPECT_EQ(bytes_kept_for_reuse(), 0);
}

TEST(ReusedMemory, IsBoundedByWhatStepsHaveInUseAtOnce) {
  // Sizes that differ from step to step: none fits another, so that each step takes fresh memory.
  // One has 6 MiB in use at most; without a bound 17.5 are kept.
  const ReusedMemoryUser user;
  std::size_t most = 0;
  for (int step = 0; step < 20; ++step) {
    age_reused_memory();
    const std::size_t bytes = kBytes >> (step % 3);
    for (int i = 0; i < 2; ++i) reused_memory().allocate(bytes + i * bytes / 2);
    most = std::max(most, bytes_kept_for_reuse());
  }
  EXPECT_GT(most, kBytes);
  EXPECT_LE(most, kBytes * 3 / 2 * 3 / 2);
}

TEST(ReusedMemory, IsTheSameInEverySteadyStep) {
  // Packets of four sizes, decoded one by one, the largest first: they have 19.25 MiB in use at
  // once and need 23.25, as none of the larger ones can be made of the memory of smaller ones.
  const ReusedMemoryUser user;
  std::size_t in_all = 0;
  for (int step = 0; step < 4; ++step) {
    age_reused_memory();
    std::vector<c10::DataPtr> packets;
    std::size_t in_use = 0;
    const auto check = [&](std::size_t decoded) {
      const std::size_t now = bytes_kept_for_reuse() + in_use + decoded;
      if (step == 0) in_all = std::max(in_all, now);
      if (step > 0) {
        EXPECT_EQ(now, in_all);
      }
    };
    for (int i = 0; i < 12; ++i) {
      packets.push_back(reused_memory().allocate(kReusedFrom << (i / 3)));
      in_use += kReusedFrom << (i / 3);
      check(0);
    }
    while (!packets.empty()) {
      const std::size_t bytes = kReusedFrom << ((packets.size() - 1) / 3);
      const c10::DataPtr decoded = reused_memory().allocate(4 * bytes);
      check(4 * bytes);
      packets.pop_back();
      in_use -= bytes;
      check(4 * bytes);
    }
  }
  EXPECT_EQ(in_all, std::size_t{93} << 18);
}

TEST(ReusedMemory, GoesBackWhenItIsIdle) {
  using std::chrono::milliseconds;
  const ReusedMemoryUser user;
  reused_memory().allocate(kBytes);
  give_back_idle_memory(milliseconds(60'000));
  EXPECT_EQ(bytes_kept_for_reuse(), kBytes);
  std::this_thread::sleep_for(milliseconds(20));
  give_back_idle_memory(milliseconds(10));
  EXPECT_EQ(bytes_kept_for_reuse(), 0);
}

TEST(ReusedMemory, GoesBackWithItsLastUser) {
  c10::DataPtr outlives;
  {
    const ReusedMemoryUser user;
    { const auto block = reused_memory().allocate(kBytes); }
    EXPECT_GT(bytes_kept_for_reuse(), 0);
    outlives = reused_memory().allocate(2 * kBytes);
    std::memset(outlives.get(), 1, 2 * kBytes);
  }
  EXPECT_EQ(bytes_kept_for_reuse(), 0);
  outlives.clear();
  EXPECT_EQ(bytes_kept_for_reuse(), 0);
}

TEST(ReusedMemory, IsNeverGivenToTwo) {
  const ReusedMemoryUser user;
  std::vector<std::thread> threads;
  std::atomic<int> mixed = 0;
  for (int id = 1; id <= 4; ++id)
    threads.emplace_back([id, &mixed] {
      for (int i = 0; i < 200; ++i) {
        const c10::DataPtr block = reused_memory().allocate(kReusedFrom);
        std::memset(block.get(), id, kReusedFrom);
        std::this_thread::yield();
        const auto* bytes = static_cast<const unsigned char*>(block.get());
        mixed += bytes[0] != id || bytes[kReusedFrom - 1] != id;
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(mixed, 0);
}

}  // namespace
}  // namespace backfold::torch_layer
