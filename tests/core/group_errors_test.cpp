// SPDX-License-Identifier: Apache-2.0
//
// Bad input: a status that names the argument and its value, and nothing written.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "backfold/group.h"
#include "base/checks.h"
#include "core/support.h"

namespace backfold::testing {
namespace {

constexpr std::int64_t kMax64 = std::numeric_limits<std::int64_t>::max();

struct BadFormat {
  GroupFormat format;
  const char* words;  // that the message must contain
};

const BadFormat kBadFormats[] = {
    {{.type = ElementType::kI32, .count = 128}, "type must be fp32, fp16, bf16 or fp64, got int32"},
    {{.type = ElementType::kBool, .count = 128}, "got bool"},
    {{.type = static_cast<ElementType>(200), .count = 128}, "got unknown (200)"},
    {{.bits = 0, .count = 128}, "bits must be one of 1, 2, 3, 4, 5, 6, 8, 16, got 0"},
    {{.bits = 7, .count = 128}, "got 7"},
    {{.bits = 32, .count = 128}, "got 32"},
    {{.bits = -4, .count = 128}, "got -4"},
    {{.bits = std::numeric_limits<int>::max(), .count = 128}, "got 2147483647"},
    {{.layout = static_cast<Layout>(3), .count = 128},
     "layout must be flat, strided or rotated, got 3"},
    {{.layout = static_cast<Layout>(255), .count = 128}, "got 255"},
    {{.group = 64, .count = 128}, "group must be 128 or 256, got 64"},
    {{.group = 0, .count = 128}, "group must be 128 or 256, got 0"},
    {{.group = -128, .count = 128}, "got -128"},
    {{.count = -1}, "count must be between 0 and 2^48, got -1"},
    {{.count = (std::int64_t{1} << 48) + 1}, "got 281474976710657"},
    {{.count = kMax64}, "got 9223372036854775807"},
    {{.layout = Layout::kStrided, .group = 256, .count = 256, .columns = 1}, "group must be 128"},
    {{.layout = Layout::kRotated, .group = 256, .count = 256}, "group must be 128"},
    {{.bits = 1, .zero_exact = true, .count = 128},
     "bits must be at least 2 for zero_exact, got 1"},
    {{.layout = Layout::kRotated, .zero_exact = true, .count = 128}, "zero_exact must be false"},
    {{.layout = Layout::kStrided, .count = 128}, "columns must divide count"},
    {{.layout = Layout::kStrided, .count = 128, .columns = -2}, "got -2 columns and 128 elements"},
    {{.layout = Layout::kStrided, .count = 128, .columns = 3}, "got 3 columns and 128 elements"},
    {{.layout = Layout::kStrided, .count = 128, .columns = kMax64}, "columns must divide count"},
    {{.type = ElementType::kBF16, .bits = 16, .count = 128}, "bits must be fewer"},
    {{.type = ElementType::kF16, .bits = 16, .count = 128}, "got 16 for fp16"},
};

TEST(GroupErrors, NameWhatIsWrongWithAFormat) {
  alignas(16) std::uint8_t memory[4'096];
  for (const BadFormat& bad : kBadFormats) {
    SCOPED_TRACE(bad.words);
    const auto code = StatusCode::kInvalidArgument;
    expect_error(validate(bad.format), code, bad.words);
    EXPECT_EQ(packed_bytes(bad.format), 0u);
    std::fill(std::begin(memory), std::end(memory), std::uint8_t{0x5a});
    const Payload payload{memory, 2'048};
    expect_error(pack(bad.format, memory + 2'048, {}, payload, {}), code, bad.words);
    expect_error(unpack(bad.format, payload, memory + 2'048, {}), code, bad.words);
    double error = -1;
    expect_error(expected_squared_error(bad.format, memory, &error), code, bad.words);
    EXPECT_EQ(error, -1);
    EXPECT_TRUE(std::all_of(std::begin(memory), std::end(memory),
                            [](std::uint8_t byte) { return byte == 0x5a; }));
  }
}

// Memory for calls that must fail. expect_untouched() checks that they wrote nothing.
class GroupCallErrors : public ::testing::Test {
 protected:
  static constexpr std::size_t kNeeded = 16 + 2 * 64;

  void expect_untouched() const {
    EXPECT_TRUE(std::all_of(std::begin(payload_), std::end(payload_),
                            [](std::uint8_t byte) { return byte == 0x5a; }));
    EXPECT_TRUE(std::all_of(std::begin(elements_), std::end(elements_),
                            [](float element) { return element == 1.5f; }));
  }

  void expect_pack_error(const void* source, Payload payload, const Execution& execution,
                         StatusCode code, std::string_view words) {
    expect_error(pack(format_, source, {}, payload, execution), code, words);
    expect_untouched();
  }
  void expect_unpack_error(ConstPayload payload, void* destination, const Execution& execution,
                           StatusCode code, std::string_view words) {
    expect_error(unpack(format_, payload, destination, execution), code, words);
    expect_untouched();
  }

  void SetUp() override {
    std::fill(std::begin(payload_), std::end(payload_), std::uint8_t{0x5a});
    std::fill(std::begin(elements_), std::end(elements_), 1.5f);
  }

  GroupFormat format_{.count = 200};
  alignas(16) std::uint8_t payload_[kNeeded + 16];
  alignas(16) float elements_[256];
};

TEST_F(GroupCallErrors, NameANullBuffer) {
  ASSERT_EQ(packed_bytes(format_), kNeeded);
  const auto code = StatusCode::kInvalidArgument;
  expect_pack_error(nullptr, {payload_, kNeeded}, {}, code, "source must not be null for 200");
  expect_unpack_error({payload_, kNeeded}, nullptr, {}, code,
                      "destination must not be null for 200");
  expect_pack_error(elements_, {nullptr, kNeeded}, {}, code, "payload must not be null for 144");
  expect_unpack_error({nullptr, kNeeded}, elements_, {}, code, "payload must not be null for 144");
  double error = 0;
  expect_error(expected_squared_error(format_, nullptr, &error), code, "source must not be null");
  expect_error(expected_squared_error(format_, elements_, nullptr), code, "error must not be null");
}

TEST_F(GroupCallErrors, NameAShortPayload) {
  const auto code = StatusCode::kShortPayload;
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{16}, kNeeded - 1}) {
    const std::string words = "payload must hold 144 bytes, got " + std::to_string(bytes);
    expect_pack_error(elements_, {payload_, bytes}, {}, code, words);
    expect_unpack_error({payload_, bytes}, elements_, {}, code, words);
  }
  expect_pack_error(elements_, {}, {}, code, "payload must hold 144 bytes, got 0");
}

TEST_F(GroupCallErrors, NameAMisalignedBuffer) {
  const auto code = StatusCode::kInvalidArgument;
  for (const std::size_t offset : {1, 2, 4, 8}) {
    expect_pack_error(elements_, {payload_ + offset, kNeeded}, {}, code,
                      "payload must be 16-byte aligned, got 0x");
    expect_unpack_error({payload_ + offset, kNeeded}, elements_, {}, code,
                        "payload must be 16-byte aligned, got 0x");
  }
  char* bytes = reinterpret_cast<char*>(elements_);
  for (const std::size_t offset : {1, 2, 3}) {
    expect_pack_error(bytes + offset, {payload_, kNeeded}, {}, code,
                      "source must be aligned to its elements of 4 bytes, got 0x");
    expect_unpack_error({payload_, kNeeded}, bytes + offset, {}, code,
                        "destination must be aligned to its elements of 4 bytes, got 0x");
  }
}

TEST_F(GroupCallErrors, NameAnExecutionThatIsNotThere) {
  const Payload payload{payload_, kNeeded};
  const struct {
    Execution execution;
    StatusCode code;
    const char* words;
  } table[] = {
      {{.threads = 0}, StatusCode::kInvalidArgument, "threads must be at least 1, got 0"},
      {{.threads = -3}, StatusCode::kInvalidArgument, "got -3"},
      {{.backend = static_cast<Backend>(9)}, StatusCode::kInvalidArgument, "backend must be"},
      {{.backend = Backend::kSimd, .simd_target = "MMX"},
       StatusCode::kUnavailable,
       "simd_target 'MMX' is not among"},
  };
  for (const auto& row : table) {
    expect_pack_error(elements_, payload, row.execution, row.code, row.words);
    expect_unpack_error(payload, elements_, row.execution, row.code, row.words);
  }
  if (!built_with_cuda()) {
    const Execution cuda{.backend = Backend::kCuda};
    expect_pack_error(elements_, payload, cuda, StatusCode::kUnavailable, "backend is cuda");
    expect_unpack_error(payload, elements_, cuda, StatusCode::kUnavailable, "backend is cuda");
  }
}

// Found only in builds that check the data.
TEST(GroupContract, NamesANegativeElementOfAZeroExactSource) {
  if (!core::kCheckContracts) GTEST_SKIP() << "built with NDEBUG";
  for (const ElementType type :
       {ElementType::kF32, ElementType::kF16, ElementType::kBF16, ElementType::kF64}) {
    const GroupFormat format{.type = type, .zero_exact = true, .count = 300};
    for (const Place& place : places()) {
      SCOPED_TRACE(std::string(name_of(type)) + " on " + place.name);
      Bytes source(300 * size_of(type));  // zeros
      // The sign bit of element 170 alone makes -0, which is allowed; one more bit a negative
      // number.
      source[171 * size_of(type) - 1] = std::byte{0x80};
      packed(format, source, Key{}, place);
      source[170 * size_of(type)] = std::byte{1};
      Memory input(place.execution.backend, source.size());
      Memory payload(place.execution.backend, packed_bytes(format));
      input.write(source);
      const Bytes before = payload.read();
      expect_error(
          pack(format, input.data(), {}, Payload{payload.data(), payload.bytes()}, place.execution),
          StatusCode::kContractBroken, "source must not be negative for zero_exact");
      EXPECT_TRUE(payload.read() == before);
    }
  }
}

}  // namespace
}  // namespace backfold::testing
