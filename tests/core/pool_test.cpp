// SPDX-License-Identifier: Apache-2.0

#include "backfold/pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "core/group_data.h"
#include "core/support.h"

namespace backfold::testing {
namespace {

constexpr int kBits[] = {0, 1, 2, 3, 4, 8};

std::string text_of(const PoolFormat& format) {
  return std::string(name_of(format.type)) + " block " + std::to_string(format.block) + " bits " +
         std::to_string(format.bits) + " of " + std::to_string(format.outer) + " x " +
         std::to_string(format.depth) + " x " + std::to_string(format.height) + " x " +
         std::to_string(format.width) + " x " + std::to_string(format.inner);
}

// The results of pack() and unpack(), the same on every backend.
void expect_agreement(const PoolFormat& format, Kind kind, std::size_t offset) {
  if (!validate(format).ok()) return;
  const Elements source = make_elements(kind, format.type, count(format), false);
  const Key key{.seed = 42, .stream = static_cast<std::uint64_t>(format.width)};
  const Bytes payload = packed(format, source.bytes, key, reference());
  const Bytes elements = unpacked(format, payload, reference());
  const std::size_t past = offset * size_of(format.type);
  for (const Place& place : places()) {
    SCOPED_TRACE(text_of(format) + ", " + name_of(kind) + ", offset " + std::to_string(offset) +
                 ", on " + place.name);
    ASSERT_TRUE(packed(format, source.bytes, key, place, past) == payload);
    ASSERT_TRUE(unpacked(format, payload, place, past) == elements);
  }
}

struct Shape {
  std::int64_t outer, depth, height, width, inner;
};

PoolFormat format_of(ElementType type, int block, int bits, const Shape& shape) {
  return {type, block, bits, shape.outer, shape.depth, shape.height, shape.width, shape.inner};
}

// Ends that do not divide in each dimension and in none; bands of many block rows, of one, and of
// parts of one; channels that a band cuts.
constexpr Shape kShapes[] = {
    {3, 1, 14, 14, 1},   {9, 1, 7, 7, 1},   {5, 1, 56, 56, 1}, {2, 1, 9, 70, 1}, {40, 1, 1, 37, 1},
    {1, 1, 1, 4'099, 1}, {6, 1, 61, 1, 1},  {3, 5, 6, 7, 1},   {2, 9, 1, 11, 1}, {1, 17, 3, 19, 1},
    {2, 1, 14, 14, 33},  {1, 1, 8, 24, 64}, {3, 1, 13, 3, 5},  {1, 5, 9, 10, 3}, {4, 1, 1, 21, 20},
    {2, 1, 33, 1, 140},  {1, 1, 16, 300, 1}};

TEST(Pool, EveryBackendGivesTheSameBytes) {
  std::size_t turn = 0;
  for (const Shape& shape : kShapes)
    for (const ElementType type : kFloatTypes)
      for (const int block : {2, 3, 4, 7, 8, 16})
        for (const int bits : kBits) {
          // Every width meets every type and every block, at shapes that take turns.
          if (++turn % 2 != 0 && block != 8) continue;
          ASSERT_NO_FATAL_FAILURE(
              expect_agreement(format_of(type, block, bits, shape), Kind::kHeavyTailed, turn % 3));
        }
}

TEST(Pool, EverySizeUpToSeventyAgrees) {
  for (std::int64_t size = 1; size <= 70; ++size)
    for (const Shape& shape : {Shape{3, 1, size, 71 - size, 1}, Shape{2, 1, 5, size, 3}})
      for (const int bits : {0, 2, 3})
        ASSERT_NO_FATAL_FAILURE(expect_agreement(
            format_of(kFloatTypes[size % 4], bits == 3 ? 5 : 8, bits, shape), Kind::kNormal, 1));
}

TEST(Pool, EveryKindOfDataAgrees) {
  for (const Kind kind : kAllKinds)
    for (const ElementType type : kFloatTypes)
      for (const int bits : {0, 1, 4})
        for (const Shape& shape : {Shape{6, 1, 14, 15, 1}, Shape{1, 1, 9, 17, 40}})
          ASSERT_NO_FATAL_FAILURE(expect_agreement(format_of(type, 8, bits, shape), kind, 0));
}

// Large enough that three threads have work.
TEST(Pool, AnyNumberOfThreadsGivesTheSameBytes) {
  for (const int bits : {0, 2})
    for (const Shape& shape : {Shape{70, 1, 56, 56, 1}, Shape{3, 1, 30, 30, 96}})
      ASSERT_NO_FATAL_FAILURE(
          expect_agreement(format_of(ElementType::kF32, 8, bits, shape), Kind::kNormal, 0));
}

// Decoders must handle bytes that no pack() wrote: averages and headers of every kind.
TEST(Pool, ArbitraryBytesDecodeAlike) {
  for (const ElementType type : kFloatTypes)
    for (const int bits : {0, 2, 8})
      for (const Shape& shape : {Shape{40, 1, 14, 14, 1}, Shape{2, 1, 20, 9, 20}}) {
        const PoolFormat format = format_of(type, 4, bits, shape);
        const Bytes payload = noise(packed_bytes(format), 7);
        const Bytes elements = unpacked(format, payload, reference());
        for (const Place& place : places())
          ASSERT_TRUE(unpacked(format, payload, place) == elements)
              << text_of(format) << " on " << place.name;
      }
}

std::vector<double> decoded(const PoolFormat& format, const Elements& source, std::uint64_t stream,
                            const Place& place = reference()) {
  const Bytes payload = packed(format, source.bytes, Key{1, stream}, place);
  return Elements{format.type, unpacked(format, payload, place)}.numbers();
}

// Positions of the elements of a tensor's blocks, by plain loops.
std::vector<std::vector<std::size_t>> blocks_of(const PoolFormat& format) {
  const std::int64_t b = format.block;
  const auto parts = [&](std::int64_t size) { return (size + b - 1) / b; };
  std::vector<std::vector<std::size_t>> blocks(
      static_cast<std::size_t>(format.outer * parts(format.depth) * parts(format.height) *
                               parts(format.width) * format.inner));
  std::size_t index = 0;
  for (std::int64_t o = 0; o < format.outer; ++o)
    for (std::int64_t d = 0; d < format.depth; ++d)
      for (std::int64_t h = 0; h < format.height; ++h)
        for (std::int64_t w = 0; w < format.width; ++w)
          for (std::int64_t c = 0; c < format.inner; ++c) {
            std::int64_t block = (o * parts(format.depth) + d / b) * parts(format.height) + h / b;
            block = (block * parts(format.width) + w / b) * format.inner + c;
            blocks[static_cast<std::size_t>(block)].push_back(index++);
          }
  return blocks;
}

TEST(Pool, WithoutAResidualElementsDecodeToTheMeanOfTheirBlock) {
  // A block cut at the wrong element is off by the spread of the data, 100 times the tolerance.
  for (const Shape& shape : kShapes)
    for (const ElementType type : kFloatTypes) {
      const PoolFormat format = format_of(type, 4, 0, shape);
      const Elements source = make_elements(Kind::kFarFromZero, type, count(format), false);
      const std::vector<double> numbers = source.numbers(), result = decoded(format, source, 0);
      double error = 0, expected = 0;
      std::size_t next = 0;
      const Bytes payload = packed(format, source.bytes, Key{}, reference());
      for (const auto& block : blocks_of(format)) {
        double mean = 0;
        for (const std::size_t i : block) mean += numbers[i] / static_cast<double>(block.size());
        std::uint16_t average;
        std::memcpy(&average, payload.data() + 2 * next++, 2);
        for (const std::size_t i : block) {
          ASSERT_NEAR(result[i], mean, 0x1p-8 * std::fabs(mean)) << text_of(format);
          ASSERT_EQ(result[i], result[block[0]]) << text_of(format);
          error += (numbers[i] - result[i]) * (numbers[i] - result[i]);
        }
        if (type != ElementType::kF16) {
          std::uint32_t bits = static_cast<std::uint32_t>(average) << 16;
          float value;
          std::memcpy(&value, &bits, 4);
          ASSERT_EQ(result[block[0]], static_cast<double>(value)) << text_of(format);
        }
      }
      ASSERT_TRUE(expected_squared_error(format, source.bytes.data(), &expected).ok());
      EXPECT_NEAR(expected, error, 1e-9 * error) << text_of(format);
    }
}

TEST(Pool, WithAResidualIsUnbiasedAndHasTheModelsVariance) {
  constexpr int kDraws = 600;
  const Shape shapes[] = {{2, 1, 14, 15, 1}, {1, 1, 9, 10, 6}, {3, 1, 1, 70, 1}};
  for (const int bits : {1, 2, 3, 4, 8})
    for (const Shape& shape : shapes) {
      const PoolFormat format = format_of(ElementType::kF32, bits == 3 ? 5 : 8, bits, shape);
      const Elements source = make_elements(Kind::kHeavyTailed, format.type, count(format), false);
      const std::vector<double> numbers = source.numbers();
      std::vector<double> sum(numbers.size()), squares(numbers.size());
      for (int draw = 0; draw < kDraws; ++draw) {
        const std::vector<double> result =
            decoded(format, source, static_cast<std::uint64_t>(draw), places()[1]);
        for (std::size_t i = 0; i < sum.size(); ++i) {
          const double error = result[i] - numbers[i];
          sum[i] += error;
          squares[i] += error * error;
        }
      }
      double expected = 0, found = 0, worst = 0, total = 0;
      ASSERT_TRUE(expected_squared_error(format, source.bytes.data(), &expected).ok());
      for (std::size_t i = 0; i < sum.size(); ++i) {
        found += squares[i] / kDraws;
        total += sum[i];
        // An element close to a code may not have left it in these draws: count one that did.
        const double step = std::sqrt(4 * expected / static_cast<double>(sum.size()));
        const double deviation = std::sqrt(squares[i]) + step;
        worst = std::max(worst, std::fabs(sum[i]) / deviation);
      }
      // Rounding to nearest has a worst of sqrt(600) = 24.
      EXPECT_LT(worst, 5.0) << text_of(format);
      EXPECT_LT(std::fabs(total) / std::sqrt(found * kDraws), 5.0) << text_of(format);
      EXPECT_NEAR(found / expected, 1.0, 0.1) << text_of(format);
    }
}

TEST(Pool, AResidualBringsBackWhatAnAverageLoses) {
  // 8 bits of a band's range of some 8 deviations: 3e-5 of the variance that pooling loses.
  const PoolFormat pooled = format_of(ElementType::kF32, 8, 0, {4, 1, 28, 28, 1});
  PoolFormat fine = pooled;
  fine.bits = 8;
  const Elements source = make_elements(Kind::kNormal, pooled.type, count(pooled), false);
  double all = 0, rest = 0;
  ASSERT_TRUE(expected_squared_error(pooled, source.bytes.data(), &all).ok());
  ASSERT_TRUE(expected_squared_error(fine, source.bytes.data(), &rest).ok());
  EXPECT_LT(rest, 1e-3 * all);
  EXPECT_GT(rest, 1e-6 * all);
}

TEST(Pool, NonFiniteElementsStayInTheirBlockOrBand) {
  const double special[] = {INFINITY, -INFINITY, NAN};
  for (const ElementType type : kFloatTypes)
    for (const double value : special)
      for (const int bits : {0, 2}) {
        const PoolFormat format = format_of(type, 8, bits, {4, 1, 56, 56, 1});
        std::vector<double> numbers(static_cast<std::size_t>(count(format)), 1.5);
        numbers[56 * 20 + 33] = value;
        const auto result = decoded(format, elements_of(type, numbers), 0);
        for (std::size_t i = 0; i < result.size(); ++i) {
          const std::size_t row = i / 56, column = i % 56;
          // A band is the 8 rows of a block row here, a block 8 of its columns.
          const bool lost = row / 8 == 2 && (bits != 0 || column / 8 == 4);
          ASSERT_EQ(std::isnan(result[i]), lost) << text_of(format) << " at " << i;
          ASSERT_TRUE(lost || result[i] == 1.5) << text_of(format) << " at " << i;
        }
      }
}

TEST(Pool, TheLargestNumbersStayFinite) {
  for (const ElementType type : kFloatTypes)
    for (const int bits : kBits)
      for (const double sign : {1.0, -1.0}) {
        const PoolFormat format = format_of(type, 4, bits, {8, 1, 16, 16, 1});
        const double most = type == ElementType::kF16    ? 65504
                            : type == ElementType::kBF16 ? 0x1.fep127
                            : type == ElementType::kF32  ? FLT_MAX
                                                         : std::numeric_limits<double>::max();
        std::vector<double> numbers(static_cast<std::size_t>(count(format)));
        for (std::size_t i = 0; i < numbers.size(); ++i)
          numbers[i] = i % 3 == 0 ? most : most * sign;
        for (const double number : decoded(format, elements_of(type, numbers), 0))
          ASSERT_TRUE(std::isfinite(number)) << text_of(format);
      }
}

TEST(Pool, TheWorkedExampleOfTheDocumentationHolds) {
  // docs/formats.md, "One band in bytes".
  const PoolFormat format = format_of(ElementType::kF32, 4, 2, {2, 1, 4, 4, 1});
  std::vector<double> numbers;
  for (int i = 0; i < 32; ++i) numbers.push_back((i < 16 ? 2.0 : 6.0) + i % 4 - 1.5);
  const Bytes payload = packed(format, elements_of(format.type, numbers).bytes, Key{}, reference());
  const unsigned expected[] = {
      0x00, 0x40, 0xc0, 0x40, 0,    0,    0,    0,    0, 0, 0, 0, 0, 0, 0, 0,
      0xa0, 0xff, 0x80, 0x3f, 0,    0,    0,    0,    0, 0, 0, 0, 0, 0, 0, 0,
      0xe4, 0xe4, 0xe4, 0xe4, 0xe4, 0xe4, 0xe4, 0xe4, 0, 0, 0, 0, 0, 0, 0, 0};
  ASSERT_EQ(payload.size(), std::size(expected));
  for (std::size_t i = 0; i < payload.size(); ++i)
    EXPECT_EQ(static_cast<unsigned>(payload[i]), expected[i]) << i;
  EXPECT_EQ(decoded(format, elements_of(format.type, numbers), 0), numbers);
}

TEST(Pool, SizesFollowFromTheFormatAlone) {
  EXPECT_EQ(packed_bytes(format_of(ElementType::kF32, 8, 0, {64, 1, 56, 56, 1})), 64u * 49 * 2);
  // 64 * 7 bands of 448 elements; a header and a spare word each.
  EXPECT_EQ(packed_bytes(format_of(ElementType::kF32, 8, 2, {64, 1, 56, 56, 1})),
            64u * (49 * 2 + 7 * 4 + 7 * (112 + 4)));
  // 64 bands of 4 block rows, two planes.
  EXPECT_EQ(packed_bytes(format_of(ElementType::kBF16, 8, 2, {128, 1, 14, 14, 1})),
            128u * 4 * 2 + 64 * 4 + 64 * 4 + 128 * 196 / 4);
  EXPECT_EQ(packed_bytes(PoolFormat{.outer = 0, .width = 8}), 0u);
}

TEST(Pool, BadInputIsRefusedByNameAndNothingIsWritten) {
  const auto invalid = StatusCode::kInvalidArgument;
  const PoolFormat good = {.block = 4, .outer = 2, .height = 8, .width = 8};
  const auto with = [&](auto change) {
    PoolFormat format = good;
    change(format);
    return format;
  };
  const std::pair<PoolFormat, std::string_view> cases[] = {
      {with([](auto& f) { f.type = ElementType::kI64; }), "type must be fp32, fp16, bf16 or fp64"},
      {with([](auto& f) { f.block = 1; }), "block must be between 2 and 16, got 1"},
      {with([](auto& f) { f.block = 17; }), "block must be between 2 and 16, got 17"},
      {with([](auto& f) { f.bits = 5; }), "bits must be one of 0, 1, 2, 3, 4, 8, got 5"},
      {with([](auto& f) { f.bits = -1; }), "bits must be one of 0, 1, 2, 3, 4, 8, got -1"},
      {with([](auto& f) { f.bits = 16; }), "bits must be one of 0, 1, 2, 3, 4, 8, got 16"},
      {with([](auto& f) { f.outer = -1; }), "outer must be between 0 and 2^48, got -1"},
      {with([](auto& f) { f.depth = 0; }), "depth must be between 1 and 2^48, got 0"},
      {with([](auto& f) { f.height = 0; }), "height must be between 1 and 2^48, got 0"},
      {with([](auto& f) { f.width = -3; }), "width must be between 1 and 2^48, got -3"},
      {with([](auto& f) { f.inner = 0; }), "inner must be between 1 and 2^48, got 0"},
      {with([](auto& f) { f.outer = kMaxElements / 32; }), "hold at most 2^48 elements together"},
      {with([](auto& f) { f.height = f.width = 1, f.inner = 64; }),
       "one of depth, height and width must be more than 1: there is nothing to pool"},
      {with([](auto& f) { f.depth = 2, f.block = 9; }),
       "block must be at most 8 where depth, height and width are pooled, got 9"},
      {PoolFormat{ElementType::kBF16, 2, 8, 1, 1, 4, 4, 1},
       "a packet of block 2 and 8 bits would take 64 bytes, and must be smaller than its source "
       "of 32 bytes"}};
  for (const Place& place : places()) {
    const Execution& where = place.execution;
    Memory source(where.backend, 512), payload(where.backend, 16), result(where.backend, 512);
    source.write(Bytes(512, std::byte{0}));
    const Bytes before = payload.read(), result_before = result.read();
    const Payload room = {payload.data(), 16};
    for (const auto& [format, words] : cases) {
      expect_error(validate(format), invalid, words);
      expect_error(pack(format, source.data(), {}, room, where), invalid, words);
      expect_error(unpack(format, room, result.data(), where), invalid, words);
      EXPECT_EQ(packed_bytes(format), 0u);
    }
    char* const at = static_cast<char*>(payload.data());
    expect_error(pack(good, nullptr, {}, room, where), invalid, "source");
    expect_error(pack(good, source.data(), {}, {at + 4, 16}, where), invalid, "aligned");
    expect_error(pack(good, source.data(), {}, {at, 15}, where), StatusCode::kShortPayload, "16");
    expect_error(unpack(good, room, nullptr, where), invalid, "destination");
    expect_error(unpack(good, {at, 0}, result.data(), where), StatusCode::kShortPayload, "16");
    EXPECT_EQ(payload.read(), before);
    EXPECT_EQ(result.read(), result_before);
  }
  double error = 0;
  expect_error(expected_squared_error(good, nullptr, &error), invalid, "source");
}

TEST(Pool, AnEmptyTensorTakesNoBytesAndNoBuffers) {
  const PoolFormat empty = {.bits = 2, .outer = 0, .height = 8, .width = 8};
  for (const Place& place : places()) {
    EXPECT_TRUE(pack(empty, nullptr, {}, {}, place.execution).ok());
    EXPECT_TRUE(unpack(empty, {}, nullptr, place.execution).ok());
  }
}

}  // namespace
}  // namespace backfold::testing
