// SPDX-License-Identifier: Apache-2.0
//
// A forced backend is the one that runs, and threads divide work without overlap.

#include "base/dispatch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "backfold/group.h"
#include "base/threads.h"
#include "core/support.h"
#include "group/simd/group.h"
#include "lossless/simd/bits.h"
#include "lossless/simd/narrow.h"
#include "pool/simd/pool.h"
#include "ranged/simd/ranged.h"
#include "samples/simd/samples.h"
#include "table/simd/table.h"

namespace backfold::testing {
namespace {

// What ran: the name that pack and unpack both reported.
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

// CMake runs this again with BACKFOLD_TARGET=reference.
TEST(Dispatch, ChoosesTheBestTargetUnlessTheEnvironmentNamesOne) {
  const std::string best =
      simd_targets().empty() ? "reference" : std::string(simd_targets().front());
  const char* named = std::getenv("BACKFOLD_TARGET");
  EXPECT_EQ(runner({}), named != nullptr ? named : best);
  if (!simd_targets().empty()) {
    EXPECT_EQ(runner({.backend = Backend::kSimd}), best);
  }
}

TEST(Dispatch, TakesEveryTargetAndTheReferenceFromTheEnvironment) {
  const core::SimdTarget* target = nullptr;
  for (const std::string_view name : simd_targets()) {
    EXPECT_TRUE(core::find_cpu_target(name, &target).ok());
    EXPECT_EQ(target, core::find_simd_target(name));
  }
  EXPECT_TRUE(core::find_cpu_target("reference", &target).ok());
  EXPECT_EQ(target, nullptr);
  EXPECT_TRUE(core::find_cpu_target("", &target).ok());
  EXPECT_EQ(target, core::find_simd_target(""));
  for (const std::string_view wrong : {"avx2", "SSE9", "Reference"}) {
    const Status status = core::find_cpu_target(wrong, &target);
    expect_error(status, StatusCode::kUnavailable, "BACKFOLD_TARGET '" + std::string(wrong) + "'");
    expect_error(status, StatusCode::kUnavailable, core::list_simd_targets());
  }
}

using Addresses = std::vector<void (*)()>;

template <typename... Functions>
Addresses addresses(Functions... functions) {
  return {reinterpret_cast<void (*)()>(functions)...};
}
Addresses functions(const cpu::BitKernels& k) { return addresses(k.pack, k.unpack); }
Addresses functions(const cpu::GroupPackers& k) {
  return addresses(k.pack, k.pack_run, k.pack_rows);
}
Addresses functions(const cpu::GroupUnpackers& k) {
  return addresses(k.unpack, k.unpack_run, k.unpack_rows);
}
Addresses functions(const cpu::NarrowKernels& k) { return addresses(k.encode, k.decode); }
Addresses functions(const cpu::PoolKernels& k) { return addresses(k.pack, k.unpack); }
Addresses functions(const cpu::RangedKernels& k) {
  return addresses(k.pack, k.unpack, k.widen_run, k.widen_row);
}
Addresses functions(const cpu::SampleKernels& k) { return addresses(k.score); }
Addresses functions(const cpu::TableKernels& k) { return addresses(k.pack, k.unpack); }

// Any target's kernels give the right bytes, so only the kernels can reveal that another target's
// were registered under a name. They carry what they were compiled for; execution.ran repeats it.
template <typename Kernels>
void expect_own_kernels(const char* family, Kernels (*kernels_of)(std::int64_t)) {
  std::set<void (*)()> seen;
  for (const std::string_view name : simd_targets()) {
    const std::int64_t bit = core::find_simd_target(name)->bit;
    const Kernels kernels = kernels_of(bit);
    EXPECT_EQ(kernels.target, bit) << family << ", " << name;
    for (const auto function : functions(kernels))
      EXPECT_TRUE(seen.insert(function).second) << family << ", " << name;
  }
}

TEST(Dispatch, HasKernelsOfItsOwnForEachTarget) {
  expect_own_kernels("bits", cpu::bit_kernels);
  expect_own_kernels("group, packing", cpu::group_packers);
  expect_own_kernels("group, unpacking", cpu::group_unpackers);
  expect_own_kernels("narrow", cpu::narrow_kernels);
  expect_own_kernels("pool", cpu::pool_kernels);
  expect_own_kernels("ranged", cpu::ranged_kernels);
  expect_own_kernels("samples", cpu::sample_kernels);
  expect_own_kernels("table", cpu::table_kernels);
}

TEST(Dispatch, ReportsWhatTheKernelsWereCompiledForNotWhatWasAskedFor) {
  if (simd_targets().size() < 2) GTEST_SKIP() << "this machine runs one SIMD target at most";
  const std::string_view worst = simd_targets().back();
  static const std::int64_t misfiled = core::find_simd_target(worst)->bit;
  std::string_view ran;
  const auto kernels = core::choose_kernels<cpu::GroupPackers>(
      {.backend = Backend::kSimd, .simd_target = simd_targets().front(), .ran = &ran},
      [](std::int64_t) { return cpu::group_packers(misfiled); });
  EXPECT_TRUE(kernels.has_value());
  EXPECT_EQ(ran, worst);
}

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

// As a pool with a single thread would: parts in any order.
int executed = 0;
void one_by_one(int parts, void (*work)(void* context, int part), void* context) {
  executed += parts;
  for (int part = parts; part-- > 0;) work(context, part);
}

TEST(Threads, CoverEveryItemOnce) {
  for (const std::int64_t items : {0, 1, 2, 3, 7, 100, 1'001}) {
    for (const std::int64_t grain : {1, 3, 10}) {
      for (const Executor executor : {Executor(nullptr), Executor(one_by_one)}) {
        for (const int threads : {1, 2, 3, 8}) {
          std::vector<std::atomic<int>> visits(static_cast<std::size_t>(items));
          std::atomic<int> calls = 0;
          core::split_over_threads(items, grain, {.threads = threads, .executor = executor},
                                   [&](std::int64_t begin, std::int64_t end) {
                                     ++calls;
                                     EXPECT_GE(end - begin, std::min(grain, items))
                                         << "a share too small for a thread";
                                     for (std::int64_t i = begin; i < end; ++i)
                                       ++visits[static_cast<std::size_t>(i)];
                                   });
          EXPECT_LE(calls, threads);
          for (const auto& count : visits)
            ASSERT_EQ(count, 1) << items << " items, grain " << grain << ", threads " << threads;
        }
      }
    }
  }
}

TEST(Threads, AreThoseOfTheExecutor) {
  executed = 0;
  core::split_over_threads(100, 10, {.threads = 4, .executor = one_by_one},
                           [](std::int64_t, std::int64_t) {});
  EXPECT_EQ(executed, 4);
  core::split_over_threads(9, 10, {.threads = 4, .executor = one_by_one},
                           [](std::int64_t, std::int64_t) {});
  EXPECT_EQ(executed, 4) << "what one thread does needs no executor";
}

TEST(Threads, RunAtTheSameTime) {
  // Each of two shares waits for the other: run one after the other, they would never finish.
  std::atomic<int> arrived = 0;
  core::split_over_threads(2, 1, {.threads = 2}, [&](std::int64_t, std::int64_t) {
    ++arrived;
    while (arrived < 2) std::this_thread::yield();
  });
  EXPECT_EQ(arrived, 2);
}

}  // namespace
}  // namespace backfold::testing
