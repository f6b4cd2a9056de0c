// SPDX-License-Identifier: Apache-2.0
//
// Restores rotated groups, for the SIMD target being compiled. Codes become values in the registers
// that rotate them back.

#if defined(BACKFOLD_GROUP_SIMD_PLACE_ROTATED_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BACKFOLD_GROUP_SIMD_PLACE_ROTATED_INL_H_
#undef BACKFOLD_GROUP_SIMD_PLACE_ROTATED_INL_H_
#else
#define BACKFOLD_GROUP_SIMD_PLACE_ROTATED_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>

#include "base/arithmetic.h"
#include "base/widths.h"
#include "group/simd/place-inl.h"
#include "group/simd/planes-inl.h"
#include "group/simd/rotation-inl.h"

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
HWY_BEFORE_NAMESPACE();
namespace backfold::cpu {
namespace HWY_NAMESPACE {

// Quarters of a group that one part of hadamard() has, and its vectors of each.
constexpr int kPartQuarters = 4 / kParts;
constexpr int kQuarterVectors = kPartVectors / kPartQuarters;

// Calls put(k, even, odd) with the codes of quarter k at positions lane, lane + 1, ...: those of
// even positions and those of odd ones.
template <int kBits, typename Put>
HWY_INLINE void load_code_pairs(const std::uint8_t* codes, int lane, const Put& put) {
  const DU du;
  if constexpr (kBits == 8) {
    VU even, odd;
    hn::LoadInterleaved2(du, reinterpret_cast<const std::uint32_t*>(codes) + lane, even, odd);
    VU parts[4];
    split_pieces<kBits>(du, even, even, [&](int k, VU code) HWY_ATTR { parts[k] = code; });
    split_pieces<kBits>(du, odd, odd, [&](int k, VU code) HWY_ATTR { put(k, parts[k], code); });
  } else {
    load_narrow_codes<kBits>(codes, core::kRotation, lane, [&](int k, V16 code) HWY_ATTR {
      const VU both = hn::BitCast(du, code);
      put(k, hn::And(both, hn::Set(du, 0xffffu)), hn::ShiftRight<16>(both));
    });
  }
}

// The values of part `part` of a group, as hadamard<kPairs>() takes them.
template <int kBits, bool kPairs>
HWY_INLINE void load_values(int part, const std::uint8_t* codes, const core::Grid& grid,
                            VF (&v)[kPartVectors]) {
  constexpr int kLanes = hn::MaxLanes(DF());
  const int first = part * kPartQuarters;
  const auto in_part = [&](int k) { return k >= first && k < first + kPartQuarters; };
  for (int i = 0; i < kQuarterVectors; i += kPairs ? 2 : 1) {
    VF* const place = v + i;
    if constexpr (kPairs) {
      load_code_pairs<kBits>(codes, i * kLanes, [&](int k, VU even, VU odd) HWY_ATTR {
        if (!in_part(k)) return;
        place[(k - first) * kQuarterVectors] = value_at<false>(even, grid, 0.0f);
        place[(k - first) * kQuarterVectors + 1] = value_at<false>(odd, grid, 0.0f);
      });
    } else {
      load_codes<kBits>(codes, core::kRotation, i * kLanes, [&](int k, VU code) HWY_ATTR {
        if (in_part(k)) place[(k - first) * kQuarterVectors] = value_at<false>(code, grid, 0.0f);
      });
    }
  }
}

// destination = D H values
template <int kBits, bool kStream, typename T>
HWY_INLINE void place_rotated(const std::uint8_t* codes, const core::Grid& grid, T* destination) {
  const DF d;
  constexpr int kLanes = hn::MaxLanes(DF());
  constexpr bool kPairs = sizeof(T) == 2;
  const auto load = [&](auto part, VF(&v)[kPartVectors])
                        HWY_ATTR { load_values<kBits, kPairs>(part, codes, grid, v); };
  hadamard<kPairs>(load, [&](int i, VF first, VF second) HWY_ATTR {
    if constexpr (kPairs) {
      const hn::Repartition<std::uint16_t, DF> d16;
      const auto bits = interleaved_elements(first, second, destination);
      const auto flipped = hn::Load(d16, kFlippedHalves.bits + i);
      put_vector<kStream>(hn::Xor(bits, flipped), d16,
                          reinterpret_cast<std::uint16_t*>(destination) + i);
    } else {
      store_elements<kStream>(d, flip_signs(first, i), destination + i);
      store_elements<kStream>(d, flip_signs(second, i + kLanes), destination + i + kLanes);
    }
  });
}

// Not inline: a flat tensor's loop is shorter without it.
template <typename T>
HWY_NOINLINE void place_rotated(int bits, const std::uint8_t* codes, const core::Grid& grid,
                                bool stream, T* destination) {
  core::with_width<kCodeWidths>(bits, [&]<int kBits>() HWY_ATTR {
    if constexpr (kBits < 8 * sizeof(T)) {
      if (stream)
        place_rotated<kBits, true>(codes, grid, destination);
      else
        place_rotated<kBits, false>(codes, grid, destination);
    }
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace backfold::cpu
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET

#endif  // BACKFOLD_GROUP_SIMD_PLACE_ROTATED_INL_H_
