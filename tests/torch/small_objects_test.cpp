// SPDX-License-Identifier: Apache-2.0
//
// Memory of small objects: what is given never overlaps, and chunks come back from any thread.

#include "torch/store/small_objects.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace backfold::torch_layer {
namespace {

struct Given {
  unsigned char* memory;
  std::size_t bytes;
  unsigned char mark;
};

std::vector<Given> give(int count) {
  std::vector<Given> given;
  for (int i = 0; i < count; ++i) {
    const std::size_t bytes = 1 + (i * 37) % 700;
    const auto mark = static_cast<unsigned char>(i);
    given.push_back({static_cast<unsigned char*>(allocate_small(bytes)), bytes, mark});
    std::memset(given.back().memory, mark, bytes);
  }
  return given;
}

bool is_intact(const Given& one) {
  return std::all_of(one.memory, one.memory + one.bytes,
                     [&](unsigned char byte) { return byte == one.mark; });
}

TEST(SmallObjects, KeepTheirBytesAndAreAligned) {
  const std::vector<Given> given = give(3000);
  for (const Given& one : given) {
    EXPECT_TRUE(is_intact(one)) << one.bytes;
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(one.memory) % 16, 0u);
  }
  for (const Given& one : given) release_small(one.memory, one.bytes);
}

TEST(SmallObjects, ComeBackFromOtherThreadsWhileMoreAreGiven) {
  const std::size_t before = small_chunks().used;
  for (int step = 0; step < 20; ++step) {
    const std::vector<Given> given = give(2000);
    std::thread backward([&] {
      for (auto one = given.rbegin(); one != given.rend(); ++one) {
        EXPECT_TRUE(is_intact(*one));
        release_small(one->memory, one->bytes);
      }
    });
    const std::vector<Given> meanwhile = give(500);
    backward.join();
    for (const Given& one : meanwhile) {
      EXPECT_TRUE(is_intact(one));
      release_small(one.memory, one.bytes);
    }
  }
  EXPECT_LE(small_chunks().used, before + 1);  // 20 steps of 27 chunks if none came back
}

TEST(SmallObjects, OfAThreadThatEndedComeBackWhole) {
  const std::size_t before = small_chunks().used;
  std::vector<Given> given;
  std::thread([&] { given = give(10); }).join();
  EXPECT_EQ(small_chunks().used, before + 1);
  for (const Given& one : given) release_small(one.memory, one.bytes);
  EXPECT_EQ(small_chunks().used, before);
}

TEST(SmallObjects, LargeOnesAreNotSmall) {
  const std::size_t before = small_chunks().used;
  void* large = allocate_small(1 << 20);
  std::memset(large, 1, 1 << 20);
  EXPECT_EQ(small_chunks().used, before);
  release_small(large, 1 << 20);
}

TEST(SmallObjects, OutliveTheirOwnersByWeakReferences) {
  std::weak_ptr<std::vector<int>> weak;
  {
    const auto strong = make_small<std::vector<int>>(100, 7);
    weak = strong;
    EXPECT_EQ((*weak.lock())[99], 7);
  }
  EXPECT_FALSE(weak.lock());
}

}  // namespace
}  // namespace backfold::torch_layer
