// SPDX-License-Identifier: Apache-2.0

#include "torch/codec/reused_memory.h"

#include <gtest/gtest.h>

#include <atomic>
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
