// SPDX-License-Identifier: Apache-2.0

#include "backfold/narrow.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "core/support.h"

namespace backfold::testing {
namespace {

constexpr std::int64_t kMin = std::numeric_limits<std::int64_t>::min();
constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kMin32 = std::numeric_limits<std::int32_t>::min();
constexpr std::int64_t kMax32 = std::numeric_limits<std::int32_t>::max();

// Formats whose largest code is the largest that its width holds, or whose numbers stand at an end
// of their type.
const NarrowFormat kFormats[] = {
    {ElementType::kI64, 0, 0, 255},
    {ElementType::kI64, 0, 0, 254, true, -100},
    {ElementType::kI64, 0, -128, 127},
    {ElementType::kI64, 0, 0, 255, true, -1},
    {ElementType::kI64, 0, 0, 65'535},
    {ElementType::kI64, 0, -7, 65'527, true, kMin},
    {ElementType::kI64, 0, 0, 65'535, true, kMax},
    {ElementType::kI64, 0, 0, 0xffff'ffff},
    {ElementType::kI64, 0, 5, 0x1'0000'0003, true, 4},
    {ElementType::kI64, 0, kMin, kMin + 1'000, true, kMax},
    {ElementType::kI64, 0, kMax - 70'000, kMax, true, kMin},
    {ElementType::kI64, 0, 42, 42},
    {ElementType::kI32, 0, 0, 255},
    {ElementType::kI32, 0, 0, 30'521, true, -100},
    {ElementType::kI32, 0, kMin32, kMin32 + 65'534, true, kMax32},
    {ElementType::kI32, 0, kMax32 - 255, kMax32},
    {ElementType::kI16, 0, -128, 127},
    {ElementType::kI16, 0, 0, 254, true, -1},
    {ElementType::kI16, 0, -32'768, -32'768 + 254, true, 32'767},
};

std::string text_of(const NarrowFormat& format) {
  return std::string(name_of(format.type)) + " " + std::to_string(format.low) + ".." +
         std::to_string(format.high) +
         (format.has_sentinel ? " or " + std::to_string(format.sentinel) : "") + ", " +
         std::to_string(format.count) + " elements";
}

void put(Bytes& bytes, std::size_t size, std::size_t i, std::uint64_t value) {
  std::memcpy(bytes.data() + i * size, &value, size);
}
std::uint64_t get(const Bytes& bytes, std::size_t size, std::size_t i) {
  std::uint64_t value = 0;
  std::memcpy(&value, bytes.data() + i * size, size);
  return value;
}

struct Sample {
  Bytes source;
  Bytes payload;
};

// Elements at both ends of the bound, the sentinel and random ones, with the payload that the
// header defines, in whole numbers wide enough that nothing wraps.
Sample sample_of(const NarrowFormat& format, std::size_t width) {
  __extension__ using Wide = __int128;
  const std::size_t size = size_of(format.type);
  const auto count = static_cast<std::size_t>(format.count);
  const Wide span = Wide{format.high} - format.low;
  Random random(count + 1);
  Sample sample = {Bytes(count * size), Bytes((count * width + 15) / 16 * 16, std::byte{0})};
  for (std::size_t i = 0; i < count; ++i) {
    Wide code = static_cast<Wide>(random.next()) % (span + 1);
    if (random.below(8) == 0) code = random.below(2) == 0 ? 0 : span;
    const bool sentinel = format.has_sentinel && random.below(5) == 0;
    const Wide value = sentinel ? Wide{format.sentinel} : format.low + code;
    put(sample.source, size, i, static_cast<std::uint64_t>(value));
    put(sample.payload, width, i, static_cast<std::uint64_t>(sentinel ? span + 1 : code));
  }
  return sample;
}

TEST(Narrow, TakesTheFewestBytesThatHoldTheLargestCode) {
  // Without counting the sentinel, the fourth would be 1 and the seventh 2.
  const std::size_t widths[] = {1, 1, 1, 2, 2, 2, 4, 4, 4, 2, 4, 1, 1, 2, 2, 1, 1, 1, 1};
  static_assert(std::size(widths) == std::size(kFormats));
  for (std::size_t i = 0; i < std::size(kFormats); ++i) {
    NarrowFormat format = kFormats[i];
    format.count = 33;
    ASSERT_TRUE(validate(format).ok()) << validate(format).message();
    EXPECT_EQ(code_bytes(format), widths[i]) << text_of(format);
    EXPECT_EQ(packed_bytes(format), (33 * widths[i] + 15) / 16 * 16) << text_of(format);
  }
}

TEST(Narrow, ComesBackAtEverySizeAndOffset) {
  // Codes cut to their width before the sentinel is looked for decode it where an element has its
  // low bits; saturating instructions fail at the ends of the types.
  for (NarrowFormat format : kFormats) {
    std::vector<std::int64_t> sizes = {0, 1'023, 1'024, 1'025, 2'049, 8'193, 131'200, 400'003};
    for (std::int64_t size = 1; size <= 300; ++size) sizes.push_back(size);
    for (const std::int64_t size : sizes) {
      format.count = size;
      const Sample sample = sample_of(format, code_bytes(format));
      const std::size_t offset = static_cast<std::size_t>(size % 5) * size_of(format.type);
      for (const Place& place : places()) {
        ASSERT_TRUE(packed(format, sample.source, place, offset) == sample.payload)
            << place.name << ", " << text_of(format);
        ASSERT_TRUE(unpacked(format, sample.payload, place, offset) == sample.source)
            << place.name << ", " << text_of(format);
      }
    }
  }
}

TEST(Narrow, EverySizeUpToAThousandOfEveryType) {
  for (const int which : {6, 13, 17}) {
    NarrowFormat format = kFormats[which];
    for (format.count = 0; format.count <= 1'025; ++format.count) {
      const Sample sample = sample_of(format, code_bytes(format));
      for (const Place& place : places()) {
        ASSERT_TRUE(packed(format, sample.source, place) == sample.payload)
            << place.name << ", " << text_of(format);
        ASSERT_TRUE(unpacked(format, sample.payload, place) == sample.source)
            << place.name << ", " << text_of(format);
      }
    }
  }
}

TEST(Narrow, EveryCodeDecodesToWhatTheHeaderSays) {
  for (NarrowFormat format : kFormats) {
    format.count = 2'000;
    const std::size_t width = code_bytes(format), size = size_of(format.type);
    const Bytes payload = noise(packed_bytes(format), 17);
    const std::uint64_t span =
        static_cast<std::uint64_t>(format.high) - static_cast<std::uint64_t>(format.low);
    Bytes expected(2'000 * size);
    for (std::size_t i = 0; i < 2'000; ++i) {
      const std::uint64_t code = get(payload, width, i);
      const bool sentinel = format.has_sentinel && code == span + 1;
      put(expected, size, i,
          static_cast<std::uint64_t>(sentinel ? format.sentinel : format.low) +
              (sentinel ? 0 : code));
    }
    for (const Place& place : places())
      EXPECT_TRUE(unpacked(format, payload, place) == expected)
          << place.name << ", " << text_of(format);
  }
}

TEST(Narrow, ABrokenBoundIsNamedInDebugBuildsAndHarmlessInOthers) {
  for (NarrowFormat format : kFormats) {
    format.count = 3'001;
    const std::size_t size = size_of(format.type);
    const bool top = format.low != kMin && format.low != kMin32 && format.low != -32'768;
    const std::int64_t broken = top ? format.low - 1 : format.high + 1;
    if (format.has_sentinel && format.sentinel == broken) continue;
    Sample sample = sample_of(format, code_bytes(format));
    put(sample.source, size, 2'222, static_cast<std::uint64_t>(broken));
    Bytes first;
    for (const Place& place : places()) {
      Memory input(place.execution.backend, sample.source.size());
      Memory payload(place.execution.backend, packed_bytes(format));
      input.write(sample.source);
      const Bytes before = payload.read();
      const Status status =
          pack(format, input.data(), {payload.data(), payload.bytes()}, place.execution);
      EXPECT_TRUE(payload.guards_intact());
#ifdef NDEBUG
      EXPECT_TRUE(status.ok()) << status.message();
      if (first.empty()) first = payload.read();
      EXPECT_TRUE(payload.read() == first) << place.name << ", " << text_of(format);
#else
      expect_error(status, StatusCode::kContractBroken,
                   "element 2222 is " + std::to_string(broken));
      EXPECT_EQ(payload.read(), before) << place.name;
#endif
    }
  }
}

TEST(Narrow, BadInputIsRefusedByNameAndNothingIsWritten) {
  const auto invalid = StatusCode::kInvalidArgument;
  const NarrowFormat good = {ElementType::kI64, 100, 0, 9};
  const std::pair<NarrowFormat, std::string_view> cases[] = {
      {{ElementType::kF32, 100, 0, 9}, "type"},
      {{ElementType::kBool, 100, 0, 9}, "type"},
      {{static_cast<ElementType>(99), 100, 0, 9}, "unknown (99)"},
      {{ElementType::kI64, -1, 0, 9}, "count"},
      {{ElementType::kI64, kMaxElements + 1, 0, 9}, "count"},
      {{ElementType::kI64, 100, 3, 2}, "low must not be above high, got 3 and 2"},
      {{ElementType::kI64, 100, kMax, kMin}, "low"},
      {{ElementType::kI64, 100, 0, 9, true, 0}, "sentinel"},
      {{ElementType::kI64, 100, 0, 9, true, 9}, "sentinel"},
      {{ElementType::kI64, 100, kMin, kMax}, "no narrower than int64"},
      {{ElementType::kI64, 100, kMin, kMax - 1, true, kMax}, "no narrower than int64"},
      {{ElementType::kI64, 100, 0, 0x1'0000'0000}, "no narrower than int64"},
      {{ElementType::kI64, 100, 0, 0xffff'ffff, true, -1}, "no narrower than int64"},
      {{ElementType::kI32, 100, 0, 65'536}, "no narrower than int32"},
      {{ElementType::kI32, 100, 0, 65'535, true, -1}, "no narrower than int32"},
      {{ElementType::kI16, 100, 0, 256}, "no narrower than int16"},
      {{ElementType::kI16, 100, 0, 255, true, -1}, "no narrower than int16"},
      {{ElementType::kI32, 100, 0x8000'0000, 0x8000'0001}, "low must be a value of int32"},
      {{ElementType::kI16, 100, 32'700, 32'768}, "high must be a value of int16"},
      {{ElementType::kI16, 100, 0, 9, true, -32'769}, "sentinel must be a value of int16"}};
  for (const Place& place : places()) {
    const Execution& where = place.execution;
    Memory source(where.backend, 800), payload(where.backend, 112), result(where.backend, 800);
    source.write(Bytes(800, std::byte{0}));
    const Bytes before = payload.read(), result_before = result.read();
    const Payload room = {payload.data(), 112};
    for (const auto& [format, words] : cases) {
      expect_error(validate(format), invalid, words);
      expect_error(pack(format, source.data(), room, where), invalid, words);
      expect_error(unpack(format, room, result.data(), where), invalid, words);
      EXPECT_EQ(packed_bytes(format), 0u);
      EXPECT_EQ(code_bytes(format), 0u);
    }
    char* const at = static_cast<char*>(payload.data());
    expect_error(pack(good, nullptr, room, where), invalid, "source");
    expect_error(pack(good, static_cast<char*>(source.data()) + 4, room, where), invalid, "source");
    expect_error(pack(good, source.data(), {nullptr, 112}, where), invalid, "payload");
    expect_error(pack(good, source.data(), {at + 4, 112}, where), invalid, "aligned");
    expect_error(pack(good, source.data(), {at, 111}, where), StatusCode::kShortPayload, "112");
    expect_error(unpack(good, room, nullptr, where), invalid, "destination");
    expect_error(unpack(good, {at, 0}, result.data(), where), StatusCode::kShortPayload, "112");
    EXPECT_EQ(payload.read(), before);
    EXPECT_EQ(result.read(), result_before);
  }
}

TEST(Narrow, AnEmptyTensorTakesNoBytesAndNoBuffers) {
  for (const Place& place : places()) {
    EXPECT_EQ(packed_bytes(NarrowFormat{}), 0u);
    EXPECT_TRUE(pack(NarrowFormat{}, nullptr, {}, place.execution).ok());
    EXPECT_TRUE(unpack(NarrowFormat{}, {}, nullptr, place.execution).ok());
  }
}

}  // namespace
}  // namespace backfold::testing
