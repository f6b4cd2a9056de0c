// SPDX-License-Identifier: Apache-2.0
//
// Codes of whole groups of finite elements, for the SIMD target being compiled.

#if defined(BACKFOLD_GROUP_SIMD_DRAW_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BACKFOLD_GROUP_SIMD_DRAW_INL_H_
#undef BACKFOLD_GROUP_SIMD_DRAW_INL_H_
#else
#define BACKFOLD_GROUP_SIMD_DRAW_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>
#include <type_traits>

#include "base/arithmetic.h"
#include "base/rng.h"
#include "base/simd/random-inl.h"
#include "base/widths.h"
#include "group/geometry.h"
#include "group/simd/planes-inl.h"
#include "group/simd/range-inl.h"

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
HWY_BEFORE_NAMESPACE();
namespace backfold::cpu {
namespace HWY_NAMESPACE {

// Groups that follow each other, in the source as in the payload.
template <typename T>
struct Draw {
  const T* values;
  int groups;
  const float* bases;  // of each group
  const float* inverses;
  std::uint8_t* codes;
  std::uint64_t first_block;
  core::MixedKey key;
  core::Levels levels;
};

// How two vectors share 2 * lanes neighbours of a quarter, and one vector of hashes: eight elements
// share a hash, so that it serves two neighbours in each quarter.
//
// Floats stay in order: a vector each, and each hash is needed in two adjacent lanes.
template <typename T>
struct Halves {
  // The block of each lane's hash, such that interleaving puts every hash where it is needed.
  static HWY_INLINE VU blocks() {
    const DU du;
    const VU lane = hn::Iota(du, 0);
    const VU in_block = hn::And(lane, hn::Set(du, 1u));
    const VU upper = hn::And(hn::ShiftRight<1>(lane), hn::Set(du, 1u));
    const VU first = hn::ShiftLeft<1>(hn::ShiftRight<2>(lane));
    return hn::Add(hn::Add(first, in_block),
                   hn::Mul(upper, hn::Set(du, static_cast<std::uint32_t>(hn::Lanes(du) / 2))));
  }

  template <int kSide>
  static HWY_INLINE VF load(const T* values) {
    return load_floats(DF(), values + kSide * hn::Lanes(DF()));
  }

  template <int kSide>
  static HWY_INLINE VU spread(VU hash) {
    return kSide == 0 ? hn::InterleaveLower(DU(), hash, hash)
                      : hn::InterleaveUpper(DU(), hash, hash);
  }

  template <int kSide, int kQuarter>
  static HWY_INLINE VU multiplier() {
    const DU du;
    return hn::OddEven(hn::Set(du, core::element_multiplier(4 + kQuarter)),
                       hn::Set(du, core::element_multiplier(kQuarter)));
  }

  template <int kWidth>
  static HWY_INLINE void store(VU first, VU second, int lane, std::uint8_t* plane) {
    store_pieces<kWidth>(first, lane, plane);
    store_pieces<kWidth>(second, lane + static_cast<int>(hn::Lanes(DU())), plane);
  }
};

// bf16 elements are the halves of 32-bit words: a vector has the even ones, another the odd ones.
// Hashes are where both need them, and codes of neighbours meet in one lane.
struct EvenOdd {
  static HWY_INLINE VU blocks() { return hn::Iota(DU(), 0); }

  template <int kSide>
  static HWY_INLINE VF load(const core::BFloat* values) {
    const DU du;
    const hn::Repartition<std::uint16_t, DU> d16;
    const VU pairs =
        hn::BitCast(du, hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(values)));
    return hn::BitCast(
        DF(), kSide == 0 ? hn::ShiftLeft<16>(pairs) : hn::And(pairs, hn::Set(du, 0xffff'0000u)));
  }

  template <int kSide>
  static HWY_INLINE VU spread(VU hash) {
    return hash;
  }

  template <int kSide, int kQuarter>
  static HWY_INLINE VU multiplier() {
    return hn::Set(DU(), core::element_multiplier(4 * kSide + kQuarter));
  }

  // Two pieces side by side are one of twice the width.
  template <int kWidth>
  static HWY_INLINE void store(VU even, VU odd, int lane, std::uint8_t* plane) {
    const DU du;
    if constexpr (kWidth == 8) {
      hn::StoreInterleaved2(even, odd, du, reinterpret_cast<std::uint32_t*>(plane) + lane);
    } else {
      store_pieces<2 * kWidth>(join_pieces<kWidth>(even, odd), lane / 2, plane);
    }
  }
};

template <typename T>
using OrderOf = std::conditional_t<std::is_same_v<T, core::BFloat>, EvenOdd, Halves<T>>;

// Codes of elements, as floats. Zero-exact counts from 1 and keeps zeros; the plain mode leaves the
// 1 that `uniform` brought in for the caller to take off.
template <bool kZeroExact, bool kClamp>
HWY_INLINE VF draw_code(VF x, VF minus_base, VF inverse, VF uniform, VF ceiling) {
  const DF d;
  const auto positive = hn::Gt(x, hn::Zero(d));
  if constexpr (kZeroExact) x = hn::Max(x, hn::Set(d, 0x1p-126f));
  // minus_base first: a load of x then folds into the addition.
  const VF raised = hn::MulAdd(hn::Add(minus_base, x), inverse, uniform);
  const VF code = hn::Floor(kClamp ? hn::Min(raised, ceiling) : raised);
  return kZeroExact ? hn::IfThenElseZero(positive, code) : code;
}

// Floats that are whole numbers below 2^23, less `excess`, in the low bits of each lane. What
// stands above them is for the caller to drop.
HWY_INLINE VU low_bits(VF v, float excess) {
  const DF d;
  const DU du;
  return hn::BitCast(du, hn::Add(v, hn::Set(d, 8388608.0f - excess)));
}

// Four codes of each lane, side by side: pieces of the plane for widths of one plane, whatever
// stands above them; for widths of two planes, and 8, four bytes. Codes of 16 bits fill two
// vectors.
struct FourCodes {
  VU low, high;
};

// code_of(k) draws the codes of quarter k.
template <int kBits, bool kZeroExact, typename CodeOf>
HWY_INLINE FourCodes four_codes(const CodeOf& code_of) {
  const DF d;
  const DU du;
  // draw_code()'s 1 on top of every code of the plain mode.
  constexpr float kOne = kZeroExact ? 0.0f : 1.0f;
  const VF c3 = code_of(std::integral_constant<int, 3>());
  const VF c2 = code_of(std::integral_constant<int, 2>());
  const VF c1 = code_of(std::integral_constant<int, 1>());
  const VF c0 = code_of(std::integral_constant<int, 0>());
  if constexpr (kBits <= 2 || kBits == 4) {
    // Up to 4 * 4 bits: the sum of shifted codes is exact in fp32.
    constexpr float kShift = 1 << kBits;
    const VF high = hn::MulAdd(c3, hn::Set(d, kShift), c2);
    const VF low = hn::MulAdd(c1, hn::Set(d, kShift), c0);
    const VU codes = low_bits(hn::MulAdd(high, hn::Set(d, kShift * kShift), low),
                              kOne * (kShift * kShift + 1) * (kShift + 1));
    return {codes, codes};
  } else if constexpr (kBits == 16) {
    return {join_pieces<4>(low_bits(c0, kOne), low_bits(c1, kOne)),
            join_pieces<4>(low_bits(c2, kOne), low_bits(c3, kOne))};
  } else {
    const VU low = low_bits(hn::MulAdd(c1, hn::Set(d, 256.0f), c0), kOne * 257.0f);
    const VU high = low_bits(hn::MulAdd(c3, hn::Set(d, 256.0f), c2), kOne * 257.0f);
    const VU codes = join_pieces<4>(low, high);
    return {codes, codes};
  }
}

template <int kBits, int kGroup, class Order>
HWY_INLINE void store_codes(FourCodes a, FourCodes b, int lane, std::uint8_t* codes) {
  if constexpr (kBits == 16) {
    auto* const words = reinterpret_cast<std::uint32_t*>(codes);
    hn::StoreInterleaved2(a.low, a.high, DU(), words + 2 * lane);
    hn::StoreInterleaved2(b.low, b.high, DU(), words + 2 * (lane + hn::Lanes(DU())));
  } else if constexpr (kBits <= 2 || kBits == 4) {
    Order::template store<kBits>(a.low, b.low, lane, codes);
  } else {
    constexpr core::Planes kPlanes = core::planes_of(kBits);
    Order::template store<kPlanes.low>(narrow_bytes<kPlanes.low>(a.low),
                                       narrow_bytes<kPlanes.low>(b.low), lane, codes);
    if constexpr (kPlanes.high != 0)
      Order::template store<kPlanes.high>(
          narrow_bytes<kPlanes.high>(hn::ShiftRight<kPlanes.low>(a.low)),
          narrow_bytes<kPlanes.high>(hn::ShiftRight<kPlanes.low>(b.low)), lane,
          codes + kGroup * kPlanes.low / 8);
  }
}

template <int kBits, bool kZeroExact, bool kClamp, int kGroup, typename T>
void draw_groups(const Draw<T>& draw) {
  using Order = OrderOf<T>;
  const DF d;
  const DU du;
  constexpr int kQuarter = kGroup / 4;
  constexpr int kStep = 2 * hn::MaxLanes(DF());
  static_assert(kQuarter % kStep == 0);
  // Hashes of all groups first: every code starts from one, and waiting for it would take longer
  // than drawing.
  constexpr int kHashes = kGroup / core::kRandomBlock;
  HWY_ALIGN std::uint32_t hashes[kBatch * kHashes];
  const VU blocks = Order::blocks();
  for (int i = 0; i < draw.groups; ++i) {
    const std::uint64_t block = draw.first_block + static_cast<std::uint64_t>(i * kHashes);
    const std::uint32_t low =
        static_cast<std::uint32_t>(block) + core::block_offset(draw.key, block);
    for (int k = 0; k < kHashes; k += kStep / 2) {
      const VU own = hn::Add(hn::Set(du, low + static_cast<std::uint32_t>(k)), blocks);
      hn::Store(block_hash(own, draw.key.second), du, hashes + i * kHashes + k);
    }
  }
  const VF ceiling = hn::Set(d, draw.levels.ceiling);
  for (int i = 0; i < draw.groups; ++i) {
    const VF minus_base = hn::Set(d, -draw.bases[i]), inverse = hn::Set(d, draw.inverses[i]);
    for (int lane = 0; lane < kQuarter; lane += kStep) {
      const VU hash = hn::Load(du, hashes + i * kHashes + lane / 2);
      const T* const values = draw.values + i * kGroup + lane;
      const auto side = [&](auto number) HWY_ATTR {
        constexpr int kSide = number;
        const VU own = Order::template spread<kSide>(hash);
        return four_codes<kBits, kZeroExact>([&](auto k) HWY_ATTR {
          const VF uniform = unit_interval(hn::Mul(own, Order::template multiplier<kSide, k>()));
          return draw_code<kZeroExact, kClamp>(Order::template load<kSide>(values + k * kQuarter),
                                               minus_base, inverse, uniform, ceiling);
        });
      };
      store_codes<kBits, kGroup, Order>(side(std::integral_constant<int, 0>()),
                                        side(std::integral_constant<int, 1>()), lane,
                                        draw.codes + i * (kGroup * kBits / 8));
    }
  }
}

template <int kBits, bool kZeroExact, typename T>
void draw_groups_of(int group, bool clamp, const Draw<T>& draw) {
  if (group == 256) return draw_groups<kBits, kZeroExact, true, 256>(draw);
  clamp ? draw_groups<kBits, kZeroExact, true, 128>(draw)
        : draw_groups<kBits, kZeroExact, false, 128>(draw);
}

template <typename T>
void draw_codes(const GroupFormat& format, bool clamp, const Draw<T>& draw) {
  core::with_width<kCodeWidths>(format.bits, [&]<int kBits>() HWY_ATTR {
    if constexpr (kBits < 8 * sizeof(T)) {
      format.zero_exact ? draw_groups_of<kBits, true>(format.group, clamp, draw)
                        : draw_groups_of<kBits, false>(format.group, clamp, draw);
    }
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace backfold::cpu
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET

#endif  // BACKFOLD_GROUP_SIMD_DRAW_INL_H_
