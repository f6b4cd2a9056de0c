// SPDX-License-Identifier: Apache-2.0

#include "torch/store/step_memory.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <vector>

namespace backfold::torch_layer {
namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr bool kKept = false;  // freed, so that a use after rewind() is seen
#else
constexpr bool kKept = true;
#endif

TEST(StepMemory, GivesAlignedMemoryToOneAtATime) {
  StepMemory memory;
  std::map<std::uintptr_t, std::size_t> given;
  for (std::size_t i = 1; i < 3'000; ++i) {
    const std::size_t alignment = std::size_t{1} << i % 7;
    const std::size_t bytes = i == 2'000 ? 1 << 20 : i % 301 + 1;
    void* const at = memory.allocate(bytes, alignment);
    std::memset(at, 1, bytes);
    const auto address = reinterpret_cast<std::uintptr_t>(at);
    EXPECT_EQ(address % alignment, 0);
    given[address] = bytes;
  }
  std::uintptr_t end = 0;
  for (const auto& [address, bytes] : given) {
    EXPECT_GE(address, end);
    end = address + bytes;
  }
  EXPECT_EQ(given.size(), 2'999);
}

TEST(StepMemory, ServesTheNextStepWithoutMore) {
  StepMemory memory;
  const auto step = [&] {
    for (int i = 0; i < 1'000; ++i) static_cast<void>(memory.allocate(1'000, 8));
  };
  step();
  const std::size_t bytes = memory.bytes();
  EXPECT_LE(bytes, 3'000'000);
  memory.rewind();
  EXPECT_EQ(memory.bytes(), kKept ? bytes : 0);
  step();
  EXPECT_EQ(memory.bytes(), bytes);
}

TEST(StepMemory, GoesBackWhenAStepDoesNotNeedIt) {
  StepMemory memory;
  for (int i = 0; i < 1'000; ++i) static_cast<void>(memory.allocate(1'000, 8));
  const std::size_t bytes = memory.bytes();
  memory.rewind();
  static_cast<void>(memory.allocate(1'000, 8));
  memory.rewind();
  EXPECT_LE(memory.bytes(), bytes / 8);
}

TEST(SpareMemory, IsLentToOneAtATime) {
  SpareMemory spare;
  const StepMemory* first = nullptr;
  {
    const SpareMemory::Lent one(spare), other(spare);
    EXPECT_NE(one.get(), other.get());
    static_cast<void>(one.get()->allocate(1'000, 8));
    first = one.get();
  }
  const SpareMemory::Lent next(spare);
  if (kKept) {
    EXPECT_EQ(next.get(), first);
  }
}

}  // namespace
}  // namespace backfold::torch_layer
