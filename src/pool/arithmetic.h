// SPDX-License-Identifier: Apache-2.0
//
// Every floating-point operation of pooling, once, for the reference and the CUDA kernels; the SIMD
// kernels do the same in vectors. pool.h defines the bytes. Headers and codes are those of
// arithmetic.h; order and rounding are part of the format, as there.

#ifndef BACKFOLD_POOL_ARITHMETIC_H_
#define BACKFOLD_POOL_ARITHMETIC_H_

#include <cstdint>

#include "base/arithmetic.h"
#include "base/convert.h"
#include "base/host_device.h"

namespace backfold::core {

// Sums of a block are kept at this scale: 256 strips of the largest numbers do not overflow.
inline constexpr float kSumScale = 0x1p-9f;

// Beyond this an element's band takes the full-range header: averages, residuals (twice as large)
// and their sums stay below kHuge.
inline constexpr float kPoolHuge = 0x1p124f;

inline constexpr std::uint16_t kNanAverage = 0x7fc0u;
inline constexpr std::uint32_t kNanBand = kExtended | kExponentMask;

template <int kRoom>
BACKFOLD_HD float tree_sum(const float (&x)[kRoom], float scale) {
  float sum[kRoom / 2];
  for (int j = 0; j < kRoom / 2; ++j) sum[j] = x[j] * scale + x[j + kRoom / 2] * scale;
  for (int half = kRoom / 4; half > 0; half /= 2)
    for (int j = 0; j < half; ++j) sum[j] = sum[j] + sum[j + half];
  return sum[0];
}

// The scaled sum of a strip, missing elements being zeros. Finite exactly if every element is.
template <int kRoom>
BACKFOLD_HD float strip_sum(const float (&x)[kRoom]) {
  const float sum = tree_sum<kRoom>(x, 1.0f);
  return is_finite(sum) ? sum * kSumScale : tree_sum<kRoom>(x, kSumScale);
}

// What the scaled sum of a block of so many elements is multiplied with.
BACKFOLD_HD float mean_factor(int elements) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(512.0f, static_cast<float>(elements));
#else
  return 512.0f / static_cast<float>(elements);
#endif
}

// The average of a block, as bf16, from its scaled sum.
BACKFOLD_HD std::uint16_t average_of(float sum, float factor) {
  if (!is_finite(sum)) return kNanAverage;
  const std::uint16_t bits = float_to_bfloat(sum * factor);
  return static_cast<std::uint16_t>((bits & 0x7fffu) == 0x7f80u ? bits - 1 : bits);
}

// Code 0 of a block in a band: what its elements are drawn from and decoded to.
BACKFOLD_HD float block_base(float average, float base) { return average + base; }

// How the elements of a band are drawn. Of its range, from the base of a block on, an element has
// the share value * scale + shift, clamped to [0, 1] since rounding errors may lead out of it.
struct BandDraw {
  float scale;  // 1 / (steps * step)
  float count;  // steps, less what keeps the largest sum of count and a number below 2 from
                // rounding up to steps + 2: 2^-22 of it, as much as fp32 rounds elsewhere
};

BACKFOLD_HD BandDraw band_draw(float inverse, const Levels& levels) {
  return {inverse * levels.inverse_count, levels.count * (1.0f - 0x1p-22f)};
}

BACKFOLD_HD float block_shift(float base, const BandDraw& band) { return -(base * band.scale); }

// The code of an element and what rounding adds, from 1 to steps + 2, exclusively. `uniform` is in
// [1, 2). (Two fused operations, the first of which clamps at no cost on a GPU.)
BACKFOLD_HD float pool_raised(float value, float shift, const BandDraw& band, float uniform) {
  float share = fused(value, band.scale, shift);
#ifdef __CUDA_ARCH__
  share = __saturatef(share);
#else
  share = share < 0.0f ? 0.0f : share < 1.0f ? share : 1.0f;
#endif
  return fused(share, band.count, uniform);
}

enum class BandForm { kGrid, kFullRange, kNan };

// The header of a band whose elements are finite and span [low, high], their residuals
// [low_residual, high_residual].
BACKFOLD_HD Range band_range(float low, float high, float low_residual, float high_residual,
                             const Levels& levels) {
  if (low < -kPoolHuge || high > kPoolHuge) return {kExponentMask | kFullRange, 0.0f, 0.0f};
  return round_outward(low_residual, high_residual, levels, kFinite);
}

BACKFOLD_HD BandForm form_of(std::uint32_t header, const Levels& levels) {
  const bool extended = (header & kExtended) != 0;
  if ((header & kExponentMask) == kExponentMask)
    return !extended && (header & kFullRange) != 0 ? BandForm::kFullRange : BandForm::kNan;
  if (extended && (header & 3u) != 0) return BandForm::kNan;
  return is_moderate(grid_in(header, levels), levels) ? BandForm::kGrid : BandForm::kNan;
}

// Whether the values of a block stay far below the largest bf16 number, as all that pack() writes
// in a grid do.
BACKFOLD_HD bool is_moderate_block(float base, float step, const Levels& levels) {
  return (base < 0.0f ? -base : base) + levels.count * step <= 0x1p126f;
}

}  // namespace backfold::core

#endif  // BACKFOLD_POOL_ARITHMETIC_H_
