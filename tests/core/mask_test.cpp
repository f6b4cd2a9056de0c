// SPDX-License-Identifier: Apache-2.0

#include "backfold/mask.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "core/support.h"

namespace backfold::testing {
namespace {

const ElementType kTypes[] = {ElementType::kF32, ElementType::kF16, ElementType::kBF16,
                              ElementType::kF64};

// Bits of values that a mask may hold: an ordinary one, subnormal, infinite, and NaNs whose
// payloads a conversion would lose.
std::vector<std::uint64_t> values_of(ElementType type) {
  switch (type) {
    case ElementType::kF16:
      return {0x3c72, 0x0001, 0x83ff, 0xfc00, 0x7c01, 0xfe55};
    case ElementType::kBF16:
      return {0x3f8e, 0x0001, 0x807f, 0xff80, 0x7f81, 0xffd5};
    case ElementType::kF32:
      return {0x3f8e38e4, 1, 0x807fffff, 0xff800000, 0x7f800001, 0xffc55555};
    default:
      return {0x3ff1c71c71c71c72, 1, 0x800fffffffffffff, 0xfff0000000000000, 0x7ff0000000000001,
              0xfff8555555555555};
  }
}

Bytes mask_of(ElementType type, std::size_t count, std::uint64_t value, std::uint64_t seed,
              std::uint64_t one_in = 2) {
  Random random(seed);
  Bytes source(count * size_of(type), std::byte{0});
  for (std::size_t i = 0; i < count; ++i)
    if (random.below(one_in) == 0)
      std::memcpy(source.data() + i * size_of(type), &value, size_of(type));
  return source;
}

Bytes expected_payload(const MaskFormat& format, const Bytes& source) {
  const std::size_t size = size_of(format.type);
  const auto count = static_cast<std::size_t>(format.count);
  Bytes payload(16 + (count + 127) / 128 * 16, std::byte{0});
  for (std::size_t i = 0; i < count; ++i) {
    const auto first = source.begin() + static_cast<std::ptrdiff_t>(i * size);
    const auto last = first + static_cast<std::ptrdiff_t>(size);
    if (std::all_of(first, last, [](std::byte byte) { return byte == std::byte{0}; })) continue;
    std::copy(first, last, payload.begin());
    payload[16 + i / 8] |= std::byte{1} << (i % 8);
  }
  return payload;
}

TEST(Mask, ComesBackBitForBitAtEverySizeAndOffset) {
  // A value that goes through fp64 loses its signalling NaN; one kept as fp32 loses fp64's digits.
  std::vector<std::int64_t> sizes = large_awkward_sizes();
  for (std::int64_t size = 0; size <= 1'025; ++size) sizes.push_back(size);
  for (const ElementType type : kTypes) {
    const std::vector<std::uint64_t> values = values_of(type);
    for (const std::int64_t size : sizes) {
      const MaskFormat format = {type, size};
      const auto seed = static_cast<std::uint64_t>(size);
      const Bytes source = mask_of(type, seed, values[seed % values.size()], seed, 1 + seed % 4);
      const Bytes expected = expected_payload(format, source);
      const std::size_t offset = seed % 5 * size_of(type);
      for (const Place& place : places()) {
        ASSERT_TRUE(packed(format, source, place, offset) == expected)
            << place.name << ", " << name_of(type) << ", " << size << " elements";
        ASSERT_TRUE(unpacked(format, expected, place, offset) == source)
            << place.name << ", " << name_of(type) << ", " << size << " elements";
      }
    }
  }
}

TEST(Mask, FindsItsValueWhereverItStands) {
  // A search of the first word alone would find 0 for all but the first of these.
  for (const ElementType type : kTypes)
    for (const std::size_t index : {0, 63, 64, 1'023, 1'024, 299'999, 300'000}) {
      const MaskFormat format = {type, 300'001};
      Bytes source(300'001 * size_of(type), std::byte{0});
      std::memcpy(source.data() + index * size_of(type), values_of(type).data(), size_of(type));
      for (const Place& place : places()) {
        const Bytes payload = packed(format, source, place);
        ASSERT_TRUE(unpacked(format, payload, place) == source)
            << place.name << ", " << name_of(type) << ", element " << index;
      }
    }
}

TEST(Mask, WithoutASecondValueKeepsZero) {
  for (const ElementType type : kTypes)
    for (const std::int64_t size : {0, 1, 5'000}) {
      const MaskFormat format = {type, size};
      const Bytes source(static_cast<std::size_t>(size) * size_of(type), std::byte{0});
      for (const Place& place : places()) {
        const Bytes payload = packed(format, source, place);
        EXPECT_EQ(payload, Bytes(packed_bytes(format), std::byte{0})) << place.name;
        EXPECT_EQ(unpacked(format, payload, place), source) << place.name;
      }
    }
  EXPECT_EQ(packed_bytes(MaskFormat{}), 16u);
}

TEST(Mask, EveryPayloadDecodesAlikeOnEveryBackend) {
  for (const ElementType type : kTypes) {
    const MaskFormat format = {type, 1'003};
    const Bytes payload = noise(packed_bytes(format), 5);
    const Bytes expected = unpacked(format, payload, reference());
    for (const Place& place : places())
      EXPECT_EQ(unpacked(format, payload, place), expected) << place.name;
  }
}

TEST(Mask, TheLookTellsTwoValuesFromMore) {
  const std::uint32_t one = std::bit_cast<std::uint32_t>(1.0f), two = one + 1;
  const std::uint32_t nan = 0x7fc00000, other_nan = 0x7fc00001, negative_zero = 0x80000000;
  struct Case {
    std::vector<std::uint32_t> elements;
    bool two_valued;
    double value;
  };
  std::vector<Case> cases = {{{}, true, 0.0},
                             {{0, 0}, true, 0.0},
                             {{one}, true, 1.0},
                             {{0, one, one, 0}, true, 1.0},
                             {{0, one, two}, false, 0.0},
                             {{0, negative_zero}, false, 0.0},
                             {{one, negative_zero}, false, 0.0},
                             {{nan, other_nan}, false, 0.0},
                             {{0x7f800000, 0}, true, HUGE_VAL}};
  cases.push_back({std::vector<std::uint32_t>(10'000, one), true, 1.0});
  cases.push_back(cases.back());
  cases.back().elements[9'999] = two;  // past the first chunk that is searched
  cases.back().two_valued = false, cases.back().value = 0.0;
  for (const Case& wanted : cases) {
    bool two_valued = !wanted.two_valued;
    double value = -1.0;
    const auto size = static_cast<std::int64_t>(wanted.elements.size());
    ASSERT_TRUE(
        find_mask_value({ElementType::kF32, size}, wanted.elements.data(), &two_valued, &value)
            .ok());
    EXPECT_EQ(two_valued, wanted.two_valued);
    EXPECT_EQ(value, wanted.value);
  }
  bool two_valued = false;
  double value = 0.0;
  const std::uint32_t nans[] = {nan, 0, nan};
  ASSERT_TRUE(find_mask_value({ElementType::kF32, 3}, nans, &two_valued, &value).ok());
  EXPECT_TRUE(two_valued && std::isnan(value));
}

TEST(Mask, TheLookReadsEveryType) {
  for (const ElementType type : kTypes) {
    const Bytes source = mask_of(type, 1'001, values_of(type)[0], 3);
    bool two_valued = false;
    double value = 0.0;
    ASSERT_TRUE(find_mask_value({type, 1'001}, source.data(), &two_valued, &value).ok());
    EXPECT_TRUE(two_valued);
    EXPECT_NEAR(value, 10.0 / 9.0, 4e-3) << name_of(type);
  }
}

TEST(Mask, AThirdValueIsABrokenContractInDebugBuilds) {
  const MaskFormat format = {ElementType::kF32, 3'000};
  for (const std::uint32_t third : {0x40000000u, 0x80000000u}) {
    Bytes source = mask_of(format.type, 3'000, 0x3f800000, 11);
    std::memcpy(source.data() + 2'500 * 4, &third, 4);
    for (const Place& place : places()) {
      Memory input(place.execution.backend, source.size());
      Memory payload(place.execution.backend, packed_bytes(format));
      input.write(source);
      const Bytes before = payload.read();
      const Status status =
          pack(format, input.data(), {payload.data(), payload.bytes()}, place.execution);
#ifdef NDEBUG
      EXPECT_TRUE(status.ok()) << status.message();
      EXPECT_TRUE(payload.guards_intact());
#else
      expect_error(status, StatusCode::kContractBroken, "source");
      if (place.execution.backend != Backend::kCuda)  // whose third value may be the second
        expect_error(status, StatusCode::kContractBroken, "element 2500");
      EXPECT_EQ(payload.read(), before) << place.name;
#endif
    }
  }
}

TEST(Mask, BadInputIsRefusedByNameAndNothingIsWritten) {
  const auto invalid = StatusCode::kInvalidArgument;
  const MaskFormat good = {ElementType::kF32, 200};
  const std::pair<MaskFormat, std::string_view> cases[] = {
      {{ElementType::kBool, 200}, "type"},
      {{ElementType::kI64, 200}, "type"},
      {{static_cast<ElementType>(77), 200}, "unknown (77)"},
      {{ElementType::kF32, -5}, "got -5"},
      {{ElementType::kF32, kMaxElements + 1}, "count"}};
  for (const Place& place : places()) {
    const Execution& where = place.execution;
    Memory source(where.backend, 800), payload(where.backend, 48), result(where.backend, 800);
    const Bytes before = payload.read(), result_before = result.read();
    const Payload room = {payload.data(), 48};
    for (const auto& [format, words] : cases) {
      expect_error(validate(format), invalid, words);
      expect_error(pack(format, source.data(), room, where), invalid, words);
      expect_error(unpack(format, room, result.data(), where), invalid, words);
      EXPECT_EQ(packed_bytes(format), 0u);
    }
    char* const at = static_cast<char*>(payload.data());
    expect_error(pack(good, nullptr, room, where), invalid, "source");
    expect_error(pack(good, source.data(), {nullptr, 48}, where), invalid, "payload");
    expect_error(pack(good, source.data(), {at + 1, 48}, where), invalid, "aligned");
    expect_error(pack(good, source.data(), {at, 47}, where), StatusCode::kShortPayload, "48");
    expect_error(unpack(good, room, nullptr, where), invalid, "destination");
    expect_error(unpack(good, {at, 47}, result.data(), where), StatusCode::kShortPayload, "48");
    EXPECT_EQ(payload.read(), before);
    EXPECT_EQ(result.read(), result_before);
  }
  bool two_valued = false;
  double value = 0.0;
  const float zeros[200] = {};
  expect_error(find_mask_value(good, nullptr, &two_valued, &value), invalid, "source");
  expect_error(find_mask_value(good, zeros, nullptr, &value), invalid, "two_valued");
  expect_error(find_mask_value(good, zeros, &two_valued, nullptr), invalid, "value");
}

}  // namespace
}  // namespace backfold::testing
