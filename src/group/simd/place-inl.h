// SPDX-License-Identifier: Apache-2.0
//
// Values of whole groups of codes, for the SIMD target being compiled.

#if defined(BACKFOLD_GROUP_SIMD_PLACE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BACKFOLD_GROUP_SIMD_PLACE_INL_H_
#undef BACKFOLD_GROUP_SIMD_PLACE_INL_H_
#else
#define BACKFOLD_GROUP_SIMD_PLACE_INL_H_
#endif

#include <hwy/highway.h>

#include <bit>
#include <cstdint>

#include "base/arithmetic.h"
#include "base/widths.h"
#include "group/geometry.h"
#include "group/simd/planes-inl.h"

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
HWY_BEFORE_NAMESPACE();
namespace backfold::cpu {
namespace HWY_NAMESPACE {

// The values of one quarter's codes.
template <bool kZeroExact>
HWY_INLINE VF value_at(VU code, VF step, VF base, float smallest) {
  const DF d;
  const DI di;
  VF number = hn::ConvertTo(d, hn::BitCast(di, code));
  if constexpr (kZeroExact) number = hn::Sub(number, hn::Set(d, 1.0f));
  const VF value = hn::MulAdd(number, step, base);
  if constexpr (!kZeroExact) return value;
  return hn::IfThenElseZero(hn::Ge(number, hn::Zero(d)), hn::Max(value, hn::Set(d, smallest)));
}

template <bool kZeroExact>
HWY_INLINE VF value_at(VU code, const core::Grid& grid, float smallest) {
  const DF d;
  return value_at<kZeroExact>(code, hn::Set(d, grid.step), hn::Set(d, grid.base), smallest);
}

// Calls put(k, codes) with the codes of quarter k at positions lane, lane + 1, ...
template <int kBits, typename Put>
HWY_INLINE void load_codes(const std::uint8_t* codes, int group, int lane, const Put& put) {
  const DU du;
  if constexpr (kBits == 16) {
    const VU mask = hn::Set(du, 0xffffu);
    VU first, second;
    hn::LoadInterleaved2(du, reinterpret_cast<const std::uint32_t*>(codes) + 2 * lane, first,
                         second);
    put(0, hn::And(first, mask));
    put(1, hn::ShiftRight<16>(first));
    put(2, hn::And(second, mask));
    put(3, hn::ShiftRight<16>(second));
  } else {
    constexpr core::Planes kPlanes = core::planes_of(kBits);
    const VU low = load_pieces<kPlanes.low>(lane, codes);
    VU high = low;
    if constexpr (kPlanes.high != 0)
      high = load_pieces<kPlanes.high>(lane, codes + group * kPlanes.low / 8);
    split_pieces<kBits>(du, low, high, put);
  }
}

template <int kBits, bool kZeroExact, bool kStream, typename T>
void place_group(const std::uint8_t* codes, int group, const core::Grid& grid, T* destination) {
  const DF d;
  const int quarter = group / 4;
  const float smallest = core::smallest_positive<T>();
  for (int lane = 0; lane < quarter; lane += static_cast<int>(hn::Lanes(d))) {
    load_codes<kBits>(codes, group, lane, [&](int k, VU code) HWY_ATTR {
      store_elements<kStream>(d, value_at<kZeroExact>(code, grid, smallest),
                              destination + k * quarter + lane);
    });
  }
}

// ---- Codes of up to 4 bits to 16-bit elements: a group has 16 different ones at most, so they are
// decoded once and then looked up, a byte at a time.

using D16 = hn::CappedTag<std::uint16_t, 32>;
using V16 = hn::Vec<D16>;

// load_pieces() for lanes of 16 bits.
template <int kWidth>
HWY_INLINE V16 load_narrow_pieces(int lane, const std::uint8_t* plane) {
  const D16 d;
  if constexpr (kWidth == 4) {
    return hn::LoadU(d, reinterpret_cast<const std::uint16_t*>(plane) + lane);
  } else if constexpr (kWidth == 2) {
    const hn::Rebind<std::uint8_t, D16> d8;
    return hn::PromoteTo(d, hn::LoadU(d8, plane + lane));
  } else {
    static_assert(kWidth == 1);
    const hn::RepartitionToWide<D16> d32;
    const hn::Rebind<std::uint8_t, decltype(d32)> d8;
    const auto bytes = hn::PromoteTo(d32, hn::LoadU(d8, plane + lane / 2));
    return hn::BitCast(d, hn::Or(bytes, hn::ShiftLeft<12>(bytes)));
  }
}

// load_codes() for lanes of 16 bits and codes of up to 6.
template <int kBits, typename Put>
HWY_INLINE void load_narrow_codes(const std::uint8_t* codes, int group, int lane, const Put& put) {
  constexpr core::Planes kPlanes = core::planes_of(kBits);
  const V16 low = load_narrow_pieces<kPlanes.low>(lane, codes);
  V16 high = low;
  if constexpr (kPlanes.high != 0)
    high = load_narrow_pieces<kPlanes.high>(lane, codes + group * kPlanes.low / 8);
  split_pieces<kBits>(D16(), low, high, put);
}

// The 16 elements that codes may mean, lower bytes and upper bytes.
struct ByteTables {
  HWY_ALIGN std::uint8_t low[16];
  HWY_ALIGN std::uint8_t high[16];

  template <typename T>
  HWY_INLINE ByteTables(const core::Grid& grid, bool zero_exact, const T*) {
    const DF d;
    const DU du;
    HWY_ALIGN T elements[16];
    const float smallest = core::smallest_positive<T>();
    for (std::uint32_t code = 0; code < 16; code += static_cast<std::uint32_t>(hn::Lanes(d))) {
      const VU codes = hn::Iota(du, code);
      store_elements<false>(d,
                            zero_exact ? value_at<true>(codes, grid, smallest)
                                       : value_at<false>(codes, grid, smallest),
                            elements + code);
    }
    // Whole tables at a time: a load that spans two stores would wait for both to reach the cache.
    const hn::FixedTag<std::uint16_t, 8> d16;
    const hn::FixedTag<std::uint8_t, 8> half;
    const hn::FixedTag<std::uint8_t, 16> d8;
    const auto first = hn::Load(d16, reinterpret_cast<const std::uint16_t*>(elements));
    const auto second = hn::Load(d16, reinterpret_cast<const std::uint16_t*>(elements) + 8);
    hn::Store(hn::Combine(d8, hn::TruncateTo(half, second), hn::TruncateTo(half, first)), d8, low);
    hn::Store(hn::Combine(d8, hn::TruncateTo(half, hn::ShiftRight<8>(second)),
                          hn::TruncateTo(half, hn::ShiftRight<8>(first))),
              d8, high);
  }
};

template <int kBits, bool kStream, typename T>
void look_up_group(const std::uint8_t* codes, int group, const core::Grid& grid, bool zero_exact,
                   T* destination) {
  const D16 d;
  const hn::Repartition<std::uint8_t, D16> d8;
  const ByteTables tables(grid, zero_exact, destination);
  const auto low_bytes = hn::LoadDup128(d8, tables.low);
  const auto high_bytes = hn::LoadDup128(d8, tables.high);
  const int quarter = group / 4;
  for (int lane = 0; lane < quarter; lane += static_cast<int>(hn::Lanes(d))) {
    const auto put = [&](int k, V16 code) HWY_ATTR {
      // An index with its top bit set gives zero: each table fills its own byte of an element.
      const auto low_index = hn::BitCast(d8, hn::Or(code, hn::Set(d, 0x8000u)));
      const auto high_index = hn::BitCast(d8, hn::Or(hn::ShiftLeft<8>(code), hn::Set(d, 0x0080u)));
      const auto element = hn::Or(hn::TableLookupBytesOr0(low_bytes, low_index),
                                  hn::TableLookupBytesOr0(high_bytes, high_index));
      put_vector<kStream>(hn::BitCast(d, element), d,
                          reinterpret_cast<std::uint16_t*>(destination) + k * quarter + lane);
    };
    load_narrow_codes<kBits>(codes, group, lane, put);
  }
}

template <typename T>
void place_values(int bits, const std::uint8_t* codes, int group, const core::Grid& grid,
                  bool zero_exact, bool stream, T* destination) {
  core::with_width<kCodeWidths>(bits, [&]<int kBits>() HWY_ATTR {
    if constexpr (sizeof(T) == 2 && kBits <= 4) {
      if (stream) {
        look_up_group<kBits, true>(codes, group, grid, zero_exact, destination);
      } else {
        look_up_group<kBits, false>(codes, group, grid, zero_exact, destination);
      }
    } else if (zero_exact && stream) {
      place_group<kBits, true, true>(codes, group, grid, destination);
    } else if (zero_exact) {
      place_group<kBits, true, false>(codes, group, grid, destination);
    } else if (stream) {
      place_group<kBits, false, true>(codes, group, grid, destination);
    } else {
      place_group<kBits, false, false>(codes, group, grid, destination);
    }
  });
}

// A group of equal elements.
template <typename T>
void fill_group(T element, int group, bool stream, T* destination) {
  using Bits = hwy::UnsignedFromSize<sizeof(T)>;
  const hn::CappedTag<Bits, 64 / sizeof(T)> d;
  const auto v = hn::Set(d, std::bit_cast<Bits>(element));
  auto* const to = reinterpret_cast<Bits*>(destination);
  const auto lanes = static_cast<int>(hn::Lanes(d));
  if (stream) {
    for (int i = 0; i < group; i += lanes) put_vector<true>(v, d, to + i);
  } else {
    for (int i = 0; i < group; i += lanes) put_vector<false>(v, d, to + i);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace backfold::cpu
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET

#endif  // BACKFOLD_GROUP_SIMD_PLACE_INL_H_
