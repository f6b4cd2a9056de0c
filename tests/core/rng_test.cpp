// SPDX-License-Identifier: Apache-2.0
//
// What stochastic rounding needs of its random numbers: each uniform, no two correlated, nothing in
// common between keys. Keys are fixed, so that a pass stays a pass. The numbers themselves must not
// change: packets of one version are those of the next.

#include "base/rng.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <unordered_set>
#include <vector>

namespace backfold::core {
namespace {

std::uint32_t hash_at(MixedKey key, std::uint64_t block) {
  return block_hash(block_offset(key, block), key.second, static_cast<std::uint32_t>(block));
}

// The number of one element, in [0, 1).
float uniform_at(MixedKey key, std::uint64_t element) {
  const std::uint32_t hash = hash_at(key, element / kRandomBlock);
  return unit_interval(hash * element_multiplier(static_cast<int>(element % kRandomBlock))) - 1.0f;
}

// Whether each element of `blocks` blocks rounds up when it is `fraction` of a step above its code.
std::vector<std::vector<bool>> decisions(MixedKey key, std::uint64_t blocks, float fraction) {
  std::vector<std::vector<bool>> up(kRandomBlock, std::vector<bool>(blocks));
  for (std::uint64_t i = 0; i < blocks * kRandomBlock; ++i)
    up[i % kRandomBlock][i / kRandomBlock] = uniform_at(key, i) >= 1.0f - fraction;
  return up;
}

// Correlation of a[0..n) with b[lag..lag + n), in standard deviations of that of independent draws.
double correlation_z(const std::vector<bool>& a, const std::vector<bool>& b, std::size_t lag = 0) {
  const std::size_t n = a.size() - lag;
  double both = 0, first = 0, second = 0;
  for (std::size_t i = 0; i < n; ++i) {
    both += a[i] && b[i + lag];
    first += a[i];
    second += b[i + lag];
  }
  const double size = static_cast<double>(n);
  const double covariance = both / size - first / size * (second / size);
  const double variance = first / size * (1 - first / size) * (second / size) * (1 - second / size);
  return covariance / std::sqrt(variance) * std::sqrt(size);
}

// The formula of docs/formats.md, computed independently. A change here changes every packet.
TEST(RandomNumbers, AreTheKnownOnes) {
  struct Answer {
    Key key;
    std::uint64_t start;  // second and first half of the mixed key
    std::uint64_t block;
    std::uint32_t hash;
    std::uint32_t bits[kRandomBlock];  // of the block's elements
  };
  constexpr std::uint64_t kAll = ~std::uint64_t{0};
  const Answer answers[] = {
      {{0, 0},
       0x4821'8226'ff3c'd4bf,
       0,
       0x88f9'56dd,
       {0xa6f1'77ff, 0xfc1d'e8a9, 0x9dee'83cd, 0xf850'c2bb, 0xa287'd193, 0xd6a7'0bb5, 0x30c9'7279,
        0x5583'0571}},
      {{1, 2},
       0x081a'5c13'7785'6b73,
       0,
       0x3951'13f3,
       {0x6879'66f1, 0xc8d6'eae7, 0x36b1'a603, 0x2d7f'03f5, 0x7d6e'ba9d, 0x139a'849b, 0xe1cf'ce17,
        0x88fd'629f}},
      {{1, 2},
       0x081a'5c13'7785'6b73,
       1,
       0xb9b8'2402,
       {0x772c'd916, 0xf6bd'f07a, 0x69c3'd762, 0xb8d8'50ee, 0x4184'725e, 0x379c'0172, 0xcbdd'c89a,
        0x4d89'6f4a}},
      {{kAll, kAll},
       0x4650'bc0e'b331'2e23,
       0x5'0000'0007,
       0x3b1e'b50e,
       {0x9cfb'629a, 0x751c'a856, 0xedd0'ccae, 0x2ffd'3582, 0x1c6f'1792, 0xf984'bb1e, 0x4fc3'2136,
        0xd0b7'4806}},
  };
  for (const Answer& answer : answers) {
    const MixedKey key = mixed(answer.key);
    EXPECT_EQ(key.first, static_cast<std::uint32_t>(answer.start));
    EXPECT_EQ(key.second, static_cast<std::uint32_t>(answer.start >> 32));
    EXPECT_EQ(hash_at(key, answer.block), answer.hash);
    for (int i = 0; i < kRandomBlock; ++i)
      EXPECT_EQ(answer.hash * element_multiplier(i), answer.bits[i]);
  }
  EXPECT_EQ(unit_interval(0x6879'66f1u), 1.0f + 3'423'411 * 0x1p-23f);
}

TEST(RandomNumbers, LieBetweenOneAndTwo) {
  EXPECT_EQ(unit_interval(0u), 1.0f);
  EXPECT_EQ(unit_interval(0xffff'ffffu), 2.0f - 0x1p-23f);
  EXPECT_EQ(unit_interval(0x8000'0000u), 1.5f);
}

TEST(RandomNumbers, AreUniformForEveryElementOfABlock) {
  constexpr int kBins = 1 << 16, kKeys = 256, kBlocks = 1 << 14;
  for (int index = 0; index < kRandomBlock; ++index) {
    std::vector<double> bins(kBins);
    for (std::uint64_t stream = 0; stream < kKeys; ++stream) {
      const MixedKey key = mixed({.seed = 11, .stream = stream});
      for (std::uint64_t block = 0; block < kBlocks; ++block)
        bins[hash_at(key, block) * element_multiplier(index) >> 16] += 1;
    }
    const double expected = 1.0 * kKeys * kBlocks / kBins;
    double chi_square = 0;
    for (const double count : bins)
      chi_square += (count - expected) * (count - expected) / expected;
    const double z = (chi_square - (kBins - 1)) / std::sqrt(2.0 * (kBins - 1));
    EXPECT_LT(std::fabs(z), 5.0) << "element " << index;  // no second shift in the hash: above 18
  }
}

// One tensor under one key: its blocks are consecutive, so the hash has only counters to work on.
TEST(RandomNumbers, AreUniformOverConsecutiveBlocks) {
  constexpr int kBins = 256;
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    const MixedKey key = mixed({.seed = seed, .stream = 5});
    for (const std::uint64_t blocks : {std::uint64_t{1} << 12, std::uint64_t{1} << 18}) {
      std::vector<double> bins(kBins);
      for (std::uint64_t i = 0; i < blocks * kRandomBlock; ++i)
        bins[static_cast<std::size_t>(uniform_at(key, i) * kBins)] += 1;
      const double expected = static_cast<double>(blocks) * kRandomBlock / kBins;
      double chi_square = 0;
      for (const double count : bins)
        chi_square += (count - expected) * (count - expected) / expected;
      const double z = (chi_square - (kBins - 1)) / std::sqrt(2.0 * (kBins - 1));
      // No shifts in the hash, a lattice: 8 to 10, as it is too even.
      EXPECT_LT(std::fabs(z), 6.0) << "seed " << seed << ", " << blocks << " blocks";
    }
  }
}

TEST(RandomNumbers, OfOneBlockAreNotCorrelated) {
  double worst = 0;
  for (std::uint64_t seed = 0; seed < 3; ++seed) {
    for (const float fraction : {0.1f, 0.5f, 0.8f}) {
      const auto up = decisions(mixed({.seed = seed, .stream = 1}), 1 << 16, fraction);
      for (int i = 0; i < kRandomBlock; ++i)
        for (int j = 0; j < i; ++j) worst = std::max(worst, std::fabs(correlation_z(up[i], up[j])));
    }
  }
  EXPECT_LT(worst, 5.0);  // one multiplier used twice: 256
}

TEST(RandomNumbers, OfNearbyBlocksAreNotCorrelated) {
  double worst = 0;
  for (std::uint64_t seed = 0; seed < 2; ++seed) {
    const auto up = decisions(mixed({.seed = seed, .stream = 2}), 1 << 15, 0.5f);
    for (const std::size_t lag : {1, 2, 3, 4, 8, 15, 16, 17, 32, 64})
      for (int i = 0; i < kRandomBlock; ++i)
        for (int j = 0; j < kRandomBlock; ++j)
          worst = std::max(worst, std::fabs(correlation_z(up[i], up[j], lag)));
  }
  EXPECT_LT(worst, 5.0);  // no second shift in the hash: 174
}

TEST(RandomNumbers, OfDifferentStreamsAndSeedsAreNotCorrelated) {
  constexpr std::uint64_t kBlocks = 1 << 12;
  const auto base = decisions(mixed({.seed = 3, .stream = 3}), kBlocks, 0.5f);
  double worst = 0;
  for (std::uint64_t other = 0; other < 64; ++other) {
    // Neighbours, and single bits anywhere in the key.
    const std::uint64_t bit = std::uint64_t{1} << other;
    for (const Key& key :
         {Key{3, 4 + other}, Key{4 + other, 3}, Key{3, 3 ^ bit}, Key{3 ^ bit, 3}}) {
      const auto up = decisions(mixed(key), kBlocks, 0.5f);
      for (int i = 0; i < kRandomBlock; ++i)
        worst = std::max(worst, std::fabs(correlation_z(base[i], up[i])));
    }
  }
  EXPECT_LT(worst, 5.0);  // a key that drops its stream: 64
}

// Errors of a group add up in a sum over its elements: their variance is what gradients see.
TEST(RandomNumbers, AddUpToTheVarianceOfIndependentOnes) {
  constexpr int kGroup = 128, kGroups = 1 << 14;
  double squares = 0;
  for (std::uint64_t stream = 0; stream < 4; ++stream) {
    const MixedKey key = mixed({.seed = 21, .stream = stream});
    for (std::uint64_t group = 0; group < kGroups; ++group) {
      double sum = 0;
      for (std::uint64_t i = 0; i < kGroup; ++i) sum += uniform_at(key, group * kGroup + i) - 0.5;
      squares += sum * sum * 12 / kGroup;
    }
  }
  const double deviation = std::sqrt(2.0 / (4 * kGroups));
  EXPECT_NEAR(squares / (4 * kGroups), 1.0, 5 * deviation);  // one number per block: 8
}

TEST(RandomNumbers, DoNotRepeatBetweenStreams) {
  // Windows of two consecutive hashes: one in common between 2^20 of them would be a coincidence
  // of 2^-24.
  std::unordered_set<std::uint64_t> seen;
  for (std::uint64_t stream = 0; stream < 256; ++stream) {
    const MixedKey key = mixed({.seed = 8, .stream = stream});
    for (std::uint64_t block = 0; block < 4096; ++block) {
      const std::uint64_t window =
          static_cast<std::uint64_t>(hash_at(key, block)) << 32 | hash_at(key, block + 1);
      EXPECT_TRUE(seen.insert(window).second) << "stream " << stream << ", block " << block;
    }
  }
}

TEST(RandomNumbers, DependOnTheUpperHalfOfTheBlock) {
  const MixedKey key = mixed({.seed = 1, .stream = 1});
  int equal = 0;
  for (std::uint64_t block = 0; block < 1024; ++block)
    equal += hash_at(key, block) == hash_at(key, block + (std::uint64_t{1} << 32));
  EXPECT_LE(equal, 1);  // without it: 1,024
}

}  // namespace
}  // namespace backfold::core
