// SPDX-License-Identifier: Apache-2.0
//
// A forced backend is the one that runs, and threads share out work without overlap.

#include "core/dispatch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "backfold/group.h"
#include "core/support.h"
#include "core/threads.h"

namespace backfold::testing {
namespace {

// What ran: the name that pack and unpack both gave.
std::string runner(Execution execution) {
  const GroupFormat format{.bits = 4, .count = 128};
  Memory source(execution.backend, 512), payload(execution.backend, packed_bytes(format));
  source.write(Bytes(512));
  std::string_view packing, unpacking;
  execution.ran = &packing;
  EXPECT_TRUE(pack(format, source.data(), {}, {payload.data(), payload.bytes()}, execution).ok());
  execution.ran = &unpacking;
  EXPECT_TRUE(unpack(format, {payload.data(), payload.bytes()}, source.data(), execution).ok());
  payload.read();  // waits for a device
  EXPECT_EQ(packing, unpacking);
  return std::string(packing);
}

TEST(Dispatch, RunsWhatIsForced) {
  EXPECT_EQ(runner({.backend = Backend::kReference}), "reference");
  for (const std::string_view target : simd_targets()) {
    EXPECT_EQ(runner({.backend = Backend::kSimd, .simd_target = target}), target);
  }
  for (const Place& place : places()) {
    if (place.execution.backend == Backend::kCuda) {
      EXPECT_EQ(runner(place.execution), "cuda");
    }
  }
}

TEST(Dispatch, ChoosesTheBestSimdTargetByItself) {
  const std::string best =
      simd_targets().empty() ? "reference" : std::string(simd_targets().front());
  EXPECT_EQ(runner({}), best);
  if (!simd_targets().empty()) {
    EXPECT_EQ(runner({.backend = Backend::kSimd}), best);
  }
}

// A kernel that was compiled for one target and filed under another would still give the right
// bytes: the table must hold a kernel of its own for each.
TEST(Dispatch, HasDistinctTargets) {
  std::set<std::string_view> names(simd_targets().begin(), simd_targets().end());
  EXPECT_EQ(names.size(), simd_targets().size());
  std::set<std::int64_t> bits;
  for (const std::string_view name : simd_targets()) bits.insert(core::find_simd_target(name)->bit);
  EXPECT_EQ(bits.size(), simd_targets().size());
}

TEST(Dispatch, ListsTheTargetsThereAreWhereOneIsNot) {
  const GroupFormat format{.count = 0};
  for (const std::string_view missing : {"avx2", "SSE9", "AVX2 "}) {
    const Status status =
        pack(format, nullptr, {}, {}, {.backend = Backend::kSimd, .simd_target = missing});
    expect_error(status, StatusCode::kUnavailable, core::list_simd_targets());
    expect_error(status, StatusCode::kUnavailable, missing);
  }
}

TEST(Threads, CoverEveryItemOnce) {
  for (const std::int64_t items : {0, 1, 2, 3, 7, 100, 1'001}) {
    for (const std::int64_t grain : {1, 3, 10}) {
      for (const int threads : {1, 2, 3, 8}) {
        std::vector<std::atomic<int>> visits(static_cast<std::size_t>(items));
        std::atomic<int> calls = 0;
        core::split_over_threads(items, grain, threads, [&](std::int64_t begin, std::int64_t end) {
          ++calls;
          EXPECT_GE(end - begin, std::min(grain, items)) << "a share too small for a thread";
          for (std::int64_t i = begin; i < end; ++i) ++visits[static_cast<std::size_t>(i)];
        });
        EXPECT_LE(calls, threads);
        for (const auto& count : visits)
          ASSERT_EQ(count, 1) << items << " items, grain " << grain << ", threads " << threads;
      }
    }
  }
}

TEST(Threads, RunAtTheSameTime) {
  // Each of two shares waits for the other: one thread after the other would never end.
  std::atomic<int> arrived = 0;
  core::split_over_threads(2, 1, 2, [&](std::int64_t, std::int64_t) {
    ++arrived;
    while (arrived < 2) std::this_thread::yield();
  });
  EXPECT_EQ(arrived, 2);
}

}  // namespace
}  // namespace backfold::testing
