// SPDX-License-Identifier: Apache-2.0

#include "backfold/copy.h"

#include <gtest/gtest.h>

#include "core/support.h"

namespace backfold::testing {
namespace {

TEST(Copy, IsTheSourceAtEverySizeAndOffset) {
  std::vector<std::int64_t> sizes = large_awkward_sizes();
  for (std::int64_t size = 0; size <= 1'025; ++size) sizes.push_back(size);
  sizes.push_back((std::int64_t{3} << 20) + 5);  // enough for every thread to have a share
  for (const std::int64_t size : sizes) {
    const CopyFormat format = {size};
    EXPECT_EQ(packed_bytes(format), static_cast<std::size_t>(size));
    const Bytes source = noise(static_cast<std::size_t>(size), static_cast<std::uint64_t>(size));
    const auto offset = static_cast<std::size_t>(size % 7);
    for (const Place& place : places()) {
      ASSERT_TRUE(packed(format, source, place, offset) == source) << place.name;
      ASSERT_TRUE(unpacked(format, source, place, offset) == source) << place.name;
    }
  }
}

TEST(Copy, BadInputIsRefusedByNameAndNothingIsWritten) {
  const auto invalid = StatusCode::kInvalidArgument;
  for (const Place& place : places()) {
    const Execution& where = place.execution;
    Memory source(where.backend, 64), payload(where.backend, 64);
    const Bytes before = payload.read();
    char* const at = static_cast<char*>(payload.data());
    for (const CopyFormat bad : {CopyFormat{-1}, CopyFormat{8 * kMaxElements + 1}}) {
      expect_error(validate(bad), invalid, "bytes");
      expect_error(pack(bad, source.data(), {at, 64}, where), invalid, "bytes");
      expect_error(unpack(bad, {at, 64}, source.data(), where), invalid, "bytes");
      EXPECT_EQ(packed_bytes(bad), 0u);
    }
    const CopyFormat good = {64};
    expect_error(pack(good, nullptr, {at, 64}, where), invalid, "source");
    expect_error(pack(good, source.data(), {nullptr, 64}, where), invalid, "payload");
    expect_error(pack(good, source.data(), {at + 2, 64}, where), invalid, "aligned");
    expect_error(pack(good, source.data(), {at, 63}, where), StatusCode::kShortPayload, "64");
    expect_error(unpack(good, {at, 64}, nullptr, where), invalid, "destination");
    expect_error(unpack(good, {at, 63}, source.data(), where), StatusCode::kShortPayload, "64");
    EXPECT_EQ(payload.read(), before);
  }
}

TEST(Copy, ABackendThatIsNotThereIsRefused) {
  const Execution unknown = {.backend = Backend::kSimd, .simd_target = "NoSuchTarget"};
  Memory source(Backend::kCpu, 16), payload(Backend::kCpu, 16);
  const Bytes before = payload.read();
  expect_error(pack(CopyFormat{16}, source.data(), {payload.data(), 16}, unknown),
               StatusCode::kUnavailable, "NoSuchTarget");
  expect_error(pack(CopyFormat{16}, source.data(), {payload.data(), 16}, {.threads = 0}),
               StatusCode::kInvalidArgument, "threads");
  if (!built_with_cuda())
    expect_error(
        pack(CopyFormat{16}, source.data(), {payload.data(), 16}, {.backend = Backend::kCuda}),
        StatusCode::kUnavailable, "CUDA");
  EXPECT_EQ(payload.read(), before);
}

}  // namespace
}  // namespace backfold::testing
