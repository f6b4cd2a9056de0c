// SPDX-License-Identifier: Apache-2.0
//
// Random signs: the bytes that the header defines on every backend, and what a projection needs of
// them. Keys are fixed, so that a pass stays a pass.

#include "backfold/signs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <vector>

#include "base/rng.h"
#include "core/support.h"

namespace backfold::testing {
namespace {

const ElementType kTypes[] = {ElementType::kF32, ElementType::kF16, ElementType::kBF16,
                              ElementType::kF64};

// The definition in backfold/signs.h, written out again.
std::uint64_t mix(std::uint64_t x) {
  const std::uint64_t x2 = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  const std::uint64_t x3 = (x2 ^ (x2 >> 27)) * 0x94d049bb133111ebu;
  return x3 ^ (x3 >> 31);
}
bool is_negative(const Key& key, std::uint64_t i) {
  const std::uint64_t start = mix(mix(key.seed + 0x9e3779b97f4a7c15u) ^ key.stream);
  return (mix(start + i / 64 * 0x9e3779b97f4a7c15u) >> (i % 64) & 1) != 0;
}

// `number` is the size's bits.
Bytes expected_signs(std::size_t element_bytes, std::uint64_t number, std::int64_t count,
                     const Key& key) {
  Bytes expected(static_cast<std::size_t>(count) * element_bytes);
  const std::uint64_t sign = std::uint64_t{1} << (8 * element_bytes - 1);
  for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
    const std::uint64_t element = is_negative(key, i) ? number ^ sign : number;
    std::memcpy(expected.data() + i * element_bytes, &element, element_bytes);
  }
  return expected;
}

// What a place writes, `offset` bytes past a multiple of 64.
Bytes written(ElementType type, float size, std::int64_t count, const Key& key, const Place& place,
              std::size_t offset = 0) {
  std::string_view ran;
  Execution execution = place.execution;
  execution.ran = &ran;
  Memory memory(execution.backend, static_cast<std::size_t>(count) * size_of(type), offset);
  const Status status = fill_signs(type, size, count, key, memory.data(), execution);
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(ran, expected_runner(execution, false));
  EXPECT_TRUE(memory.guards_intact()) << "written out of bounds";
  return memory.read();
}

// `count` signs of 1 or -1.
std::vector<int> signs(std::int64_t count, const Key& key) {
  const Bytes bytes = written(ElementType::kF32, 1.0f, count, key, reference());
  std::vector<int> found;
  for (std::size_t i = 3; i < bytes.size(); i += 4)
    found.push_back((bytes[i] & std::byte{0x80}) == std::byte{0} ? 1 : -1);
  return found;
}

TEST(Signs, AreThoseOfTheHeaderFileAtEverySizeAndOffset) {
  std::vector<std::int64_t> sizes = large_awkward_sizes();
  for (std::int64_t size = 0; size <= 1'025; ++size) sizes.push_back(size);
  const std::uint64_t ones[] = {0x3f80'0000, 0x3c00, 0x3f80, 0x3ff0'0000'0000'0000};
  for (const ElementType type : kTypes)
    for (const std::int64_t count : sizes) {
      const auto seed = static_cast<std::uint64_t>(count);
      const Key key = {seed * 0x1234'5678'9abc'def1u, ~seed};
      const Bytes expected =
          expected_signs(size_of(type), ones[static_cast<std::size_t>(type)], count, key);
      for (const Place& place : places())
        ASSERT_TRUE(written(type, 1.0f, count, key, place, seed % 5 * size_of(type)) == expected)
            << place.name << ", " << name_of(type) << ", " << count << " elements";
    }
}

TEST(Signs, AreThoseOfTheExampleInTheDocumentation) {
  const std::vector<int> drawn = signs(128, {.seed = 1, .stream = 2});
  std::uint64_t words[2] = {};
  for (std::size_t i = 0; i < 128; ++i)
    words[i / 64] |= std::uint64_t{drawn[i] < 0 ? 1u : 0u} << i % 64;
  EXPECT_EQ(words[0], 0x30cf'bc46'a7e3'5530u);
  EXPECT_EQ(words[1], 0xd2f6'd047'0be1'a7b1u);
}

TEST(Signs, RoundTheirSizeToTheType) {
  struct Case {
    float size;
    std::uint64_t bits[4];  // in the order of kTypes
  };
  const Case cases[] = {
      {0.17677669f, {0x3e3504f3, 0x31a8, 0x3e35, 0x3fc6a09e60000000}},  // 1 / sqrt(32)
      {0x1.01p0f, {0x3f808000, 0x3c04, 0x3f80, 0x3ff0100000000000}},    // bf16: ties to even
      {0x1.03p0f, {0x3f818000, 0x3c0c, 0x3f82, 0x3ff0300000000000}},
      {0x1.002p0f, {0x3f801000, 0x3c00, 0x3f80, 0x3ff0020000000000}},  // fp16: ties to even
      {0x1.006p0f, {0x3f803000, 0x3c02, 0x3f80, 0x3ff0060000000000}},
      {1e-6f, {0x358637bd, 0x0011, 0x3586, 0x3eb0c6f7a0000000}},  // fp16: subnormal
      {1e6f, {0x49742400, 0x7bff, 0x4974, 0x412e848000000000}},   // fp16: too large
      {FLT_MAX, {0x7f7fffff, 0x7bff, 0x7f7f, 0x47efffffe0000000}},
      {-1.0f, {0xbf800000, 0xbc00, 0xbf80, 0xbff0000000000000}},
      {0.0f, {0, 0, 0, 0}},
  };
  for (const Case& wanted : cases)
    for (std::size_t i = 0; i < 4; ++i)
      for (const Place& place : places())
        EXPECT_EQ(written(kTypes[i], wanted.size, 133, Key{5, 6}, place),
                  expected_signs(size_of(kTypes[i]), wanted.bits[i], 133, Key{5, 6}))
            << place.name << ", " << name_of(kTypes[i]) << ", " << wanted.size;
}

// Sums of products over keys, in standard deviations of those of independent signs.
TEST(Signs, AndTheirProductsAverageToZeroOverKeys) {
  constexpr int kKeys = 8'192, kPlaces = 192, kTuples = 4'096;
  std::vector<std::vector<int>> drawn;
  for (std::uint64_t stream = 0; stream < kKeys; ++stream)
    drawn.push_back(signs(kPlaces, {.seed = 17, .stream = stream}));
  const auto score = [&](std::initializer_list<std::uint64_t> places) {
    int sum = 0;
    for (const std::vector<int>& one : drawn) {
      int product = 1;
      for (const std::uint64_t place : places) product *= one[place];
      sum += product;
    }
    return std::fabs(sum) / std::sqrt(double{kKeys});
  };
  double single = 0, pair = 0, triple = 0, four = 0;
  Random random(3);
  const auto other = [&](std::uint64_t than) {  // a place of another 48
    return (than / 48 * 48 + 48 + random.below(48)) % kPlaces;
  };
  for (std::uint64_t i = 0; i < kPlaces; ++i) {
    single = std::max(single, score({i}));
    for (std::uint64_t j = 0; j < i; ++j) pair = std::max(pair, score({i, j}));
  }
  for (int n = 0; n < kTuples; ++n) {
    const std::uint64_t a = random.below(48), b = other(a), c = other(b), d = other(c);
    triple = std::max(triple, score({a, b, c}));
    four = std::max(four, score({a, b, c, d}));
  }
  // The largest of 18,336 is about 4. Without the multiplications pairs score 89 and fours 31; with
  // a key that drops its stream all score 91.
  EXPECT_LT(single, 5.0);
  EXPECT_LT(pair, 5.0);
  EXPECT_LT(triple, 5.0);
  EXPECT_LT(four, 5.0);
}

// The variance of x P P^T adds up (P_a . P_b)^2 over pairs of rows: products of four signs, two and
// two of them as far apart as the rows are.
TEST(Signs, MakeRowsAsOrthogonalAsIndependentOnes) {
  constexpr std::size_t kRows = 96;
  for (const std::size_t kept : {8, 32, 64, 100, 128, 179}) {
    double sum = 0, squares = 0, pairs = 0;
    for (std::uint64_t stream = 0; stream < 64; ++stream) {
      const std::vector<int> matrix =
          signs(static_cast<std::int64_t>(kRows * kept), {.seed = 1, .stream = stream});
      for (std::size_t a = 0; a < kRows; ++a)
        for (std::size_t b = 0; b < a; ++b) {
          int dot = 0;
          for (std::size_t k = 0; k < kept; ++k) dot += matrix[a * kept + k] * matrix[b * kept + k];
          sum += dot;
          squares += 1.0 * dot * dot;
          pairs += 1;
        }
    }
    const auto size = static_cast<double>(kept);
    EXPECT_LT(std::fabs(sum) / std::sqrt(pairs * size), 5.0) << kept << " columns";
    // (P_a . P_b)^2 / kept is 1 on average, with a variance of 2 - 2 / kept.
    const double score = (squares / size - pairs) / std::sqrt(pairs * (2 - 2 / size));
    // Half of a word used twice: 29 to 387. Keys whose words are those of others, shifted: 12.
    EXPECT_LT(std::fabs(score), 5.0) << kept << " columns";
  }
}

TEST(Signs, OfOneKeyAreNotCorrelatedWithThoseAfterThem) {
  constexpr std::int64_t kCount = 1 << 18;
  for (std::uint64_t seed = 0; seed < 2; ++seed) {
    const std::vector<int> drawn = signs(kCount, {.seed = seed, .stream = 2});
    for (std::size_t lag = 0; lag <= 512; ++lag) {
      int sum = 0;
      for (std::size_t i = 0; i + lag < kCount; ++i)
        sum += drawn[i] * (lag == 0 ? 1 : drawn[i + lag]);
      // Half of a word used twice: 256 at lag 32. Without the multiplications: up to 50.
      EXPECT_LT(std::fabs(sum) / std::sqrt(double{kCount}), 5.0) << "lag " << lag;
    }
  }
}

TEST(Signs, OfDifferentStreamsAndSeedsHaveNothingInCommon) {
  constexpr std::int64_t kCount = 1 << 12;
  const std::vector<int> base = signs(kCount, {3, 3});
  for (std::uint64_t other = 0; other < 64; ++other) {
    const std::uint64_t bit = std::uint64_t{1} << other;
    for (const Key& key :
         {Key{3, 4 + other}, Key{4 + other, 3}, Key{3, 3 ^ bit}, Key{3 ^ bit, 3}}) {
      const std::vector<int> drawn = signs(kCount, key);
      int sum = 0;
      for (std::size_t i = 0; i < kCount; ++i) sum += base[i] * drawn[i];
      // A key that drops its stream: 64.
      EXPECT_LT(std::fabs(sum) / std::sqrt(double{kCount}), 5.0) << key.seed << ", " << key.stream;
    }
  }
}

// A projection takes signs and the rounding of its codes from one key.
TEST(Signs, AreNotCorrelatedWithTheRoundingOfTheSameKey) {
  constexpr int kKeys = 1 << 14;
  for (const std::uint64_t place : {0, 1, 7, 8, 64, 100}) {
    std::vector<int> sums(128);
    for (std::uint64_t stream = 0; stream < kKeys; ++stream) {
      const Key key = {.seed = 9, .stream = stream};
      const core::MixedKey mixed = core::mixed(key);
      const std::uint32_t hash =
          core::block_hash(core::block_offset(mixed, place / 8), mixed.second,
                           static_cast<std::uint32_t>(place / 8));
      const bool up = (hash * core::element_multiplier(static_cast<int>(place % 8)) >> 31) != 0;
      for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += is_negative(key, i) == up ? 1 : -1;
    }
    for (std::size_t i = 0; i < sums.size(); ++i)
      EXPECT_LT(std::fabs(sums[i]) / std::sqrt(double{kKeys}), 5.0) << place << ", " << i;
  }
}

TEST(Signs, BadInputIsRefusedByNameAndNothingIsWritten) {
  const auto invalid = StatusCode::kInvalidArgument;
  const Key key;
  for (const Place& place : places()) {
    const Execution& where = place.execution;
    Memory memory(where.backend, 64);
    const Bytes before = memory.read();
    char* const at = static_cast<char*>(memory.data());
    for (const ElementType bad : {ElementType::kI32, ElementType::kBool, ElementType{99}})
      expect_error(fill_signs(bad, 1.0f, 4, key, at, where), invalid, "type");
    for (const float bad : {INFINITY, -INFINITY, std::numeric_limits<float>::quiet_NaN()})
      expect_error(fill_signs(ElementType::kF32, bad, 4, key, at, where), invalid, "size");
    for (const std::int64_t bad : {std::int64_t{-1}, kMaxElements + 1})
      expect_error(fill_signs(ElementType::kF32, 1.0f, bad, key, at, where), invalid, "count");
    expect_error(fill_signs(ElementType::kF32, 1.0f, 4, key, nullptr, where), invalid,
                 "destination");
    expect_error(fill_signs(ElementType::kF32, 1.0f, 4, key, at + 2, where), invalid, "aligned");
    expect_error(fill_signs(ElementType::kF64, 1.0f, 4, key, at + 4, where), invalid, "aligned");
    EXPECT_TRUE(fill_signs(ElementType::kF32, 1.0f, 0, key, nullptr, where).ok());
    EXPECT_EQ(memory.read(), before);
  }
}

TEST(Signs, ABackendThatIsNotThereIsRefused) {
  Memory memory(Backend::kCpu, 64);
  const Bytes before = memory.read();
  const auto fill = [&](const Execution& where) {
    return fill_signs(ElementType::kF32, 1.0f, 16, Key{}, memory.data(), where);
  };
  expect_error(fill({.backend = Backend::kSimd, .simd_target = "NoSuchTarget"}),
               StatusCode::kUnavailable, "NoSuchTarget");
  expect_error(fill({.threads = 0}), StatusCode::kInvalidArgument, "threads");
  if (!built_with_cuda())
    expect_error(fill({.backend = Backend::kCuda}), StatusCode::kUnavailable, "CUDA");
  EXPECT_EQ(memory.read(), before);
}

}  // namespace
}  // namespace backfold::testing
