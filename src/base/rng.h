// SPDX-License-Identifier: Apache-2.0
//
// Random bits from (key, element), with no state.
//
// Stochastic rounding asks little of its random numbers: each must be uniform to about 23 bits,
// those of neighbouring elements must not be correlated (or the errors of a group would add up
// instead of cancelling), and those of two tensors or two steps must have nothing in common. It
// does not ask for a generator that resists analysis, and a good one (Philox takes some 60
// instructions for 4 numbers) would cost more than the rest of the codec. So: eight elements share
// one 32-bit hash of (key, block), two rounds of multiply and shift; each takes the upper bits of
// its product with a multiplier of its own. A multiplication is a bijection, so every number is as
// uniform as the hash; the ratio of two of the multipliers is a large number without structure, so
// pairs of them spread over the square as pairs of a linear congruential generator with a good
// multiplier do. rng_test.cpp holds both to statistics.
//
// Random signs (signs.h) are asked for more: the squared error of a projection adds up products of
// four of them. 64 share a hash of 64 bits, two full rounds, and take a bit of it each.

#ifndef BACKFOLD_BASE_RNG_H_
#define BACKFOLD_BASE_RNG_H_

#include <cstdint>

#include "backfold/types.h"
#include "base/host_device.h"

namespace backfold::core {

// Elements that share a hash.
inline constexpr int kRandomBlock = 8;

// A Key, mixed once on the host.
struct MixedKey {
  std::uint32_t first;
  std::uint32_t second;
  const std::uint32_t* turn;  // device memory, for kernels there
};

BACKFOLD_HD constexpr std::uint64_t mix64(std::uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58'476d'1ce4'e5b9u;
  x = (x ^ x >> 27) * 0x94d0'49bb'1331'11ebu;
  return x ^ x >> 31;
}

constexpr MixedKey mixed(const Key& key) {
  const std::uint64_t x = mix64(mix64(key.seed + 0x9e37'79b9'7f4a'7c15u) ^ key.stream);
  return {static_cast<std::uint32_t>(x), static_cast<std::uint32_t>(x >> 32), key.turn};
}

// The same for a call in host memory, whose number is read now.
inline MixedKey mixed_on_host(const Key& key) {
  MixedKey mixed = core::mixed(key);
  if (mixed.turn) mixed.first += *mixed.turn;
  mixed.turn = nullptr;
  return mixed;
}

// The first half of a key, in its turn.
BACKFOLD_HD std::uint32_t first_of(MixedKey key) {
#ifdef __CUDA_ARCH__
  return key.turn ? key.first + __ldg(key.turn) : key.first;
#else
  return key.first;
#endif
}

// The part of a block's hash that its upper 32 bits decide; the same for the blocks of one group.
BACKFOLD_HD std::uint32_t block_offset(MixedKey key, std::uint64_t block) {
  return first_of(key) + static_cast<std::uint32_t>(block >> 32) * 0x9e37'79b1u;
}

inline constexpr std::uint32_t kHashMultiplier = 0x7feb'352du;

BACKFOLD_HD std::uint32_t block_hash(std::uint32_t offset, std::uint32_t second,
                                     std::uint32_t block_low) {
  std::uint32_t x = block_low + offset;
  x ^= x >> 16;
  x = x * kHashMultiplier + second;
  return x ^ x >> 15;
}

// The multiplier of the block's element number `index`.
BACKFOLD_HD constexpr std::uint32_t element_multiplier(int index) {
  switch (index) {
    case 0:
      return 0x846c'a68bu;
    case 1:
      return 0xc2b2'ae3du;
    case 2:
      return 0x9e37'79b1u;
    case 3:
      return 0x85eb'ca77u;
    case 4:
      return 0x27d4'eb2fu;
    case 5:
      return 0xd6e8'feb9u;
    case 6:
      return 0xb529'7a4du;
    default:
      return 0x68e3'1da5u;
  }
}

// A number in [1, 2) from an element's 32 random bits: the upper 23 become the fraction.
BACKFOLD_HD float unit_interval(std::uint32_t random) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(__funnelshift_r(random, 0x7fu, 9));
#else
  return float_of(random >> 9 | 0x3f80'0000u);
#endif
}

// Elements whose signs share a word.
inline constexpr int kSignBlock = 64;

// Their signs: bit j is that of element kSignBlock * word + j.
BACKFOLD_HD std::uint64_t sign_word(MixedKey key, std::uint64_t word) {
  const std::uint64_t x = static_cast<std::uint64_t>(key.second) << 32 | first_of(key);
  return mix64(x + word * 0x9e37'79b9'7f4a'7c15u);
}

// The bits of a number, negated if the lowest bit of `signs` is set.
template <typename U>
BACKFOLD_HD U with_sign(U number, std::uint64_t signs) {
  return static_cast<U>(number ^ static_cast<U>(signs) << (8 * sizeof(U) - 1));
}

}  // namespace backfold::core

#endif  // BACKFOLD_BASE_RNG_H_
