// SPDX-License-Identifier: Apache-2.0
//
// Stretches of a tensor whose values are scaled by row (RowAffine), for the SIMD target being
// compiled.

#if defined(BACKFOLD_GROUP_SIMD_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BACKFOLD_GROUP_SIMD_ROWS_INL_H_
#undef BACKFOLD_GROUP_SIMD_ROWS_INL_H_
#else
#define BACKFOLD_GROUP_SIMD_ROWS_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>

#include "base/simd/elements-inl.h"
#include "group/row_affine.h"

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
HWY_BEFORE_NAMESPACE();
namespace backfold::cpu {
namespace HWY_NAMESPACE {

// Walks over `count` consecutive elements from number `element` on. Calls one_row(first, n, row)
// for stretches of one row, or with runs of one element each_row(first, n, row) for stretches whose
// elements have rows that follow each other.
template <typename OneRow, typename EachRow>
HWY_INLINE void for_stretches(const RowAffine& rows, std::int64_t element, std::int64_t count,
                              OneRow one_row, EachRow each_row) {
  auto [row, place] = core::row_place(rows, element);
  for (std::int64_t first = 0; first < count;) {
    std::int64_t n;
    if (rows.run == 1) {
      n = std::min(count - first, rows.rows - row);
      each_row(first, n, row);
      row += n;
    } else {
      n = std::min(count - first, rows.run - place);
      one_row(first, n, row);
      place = 0;
      ++row;
    }
    if (row == rows.rows) row = 0;
    first += n;
  }
}

// core::one_nan(), core::scaled() and core::restored() of vectors.
HWY_INLINE VF one_nan(VF value) {
  const DF d;
  return hn::IfThenElse(hn::IsNaN(value), hn::BitCast(d, hn::Set(DU(), core::kNanBits)), value);
}
HWY_INLINE VF scaled(VF x, VF shift, VF scale) {
  return one_nan(hn::Mul(hn::Sub(x, shift), scale));
}
HWY_INLINE VF restored(VF y, VF shift, VF inverse) {
  return one_nan(hn::Add(hn::Mul(y, inverse), shift));
}

// y = (x - shift) * scale of `count` consecutive elements, number `element` the first.
template <typename T>
void scale_elements(const RowAffine& rows, const T* source, std::int64_t element,
                    std::int64_t count, float* values) {
  const DF d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for_stretches(
      rows, element, count,
      [&](std::int64_t first, std::int64_t n, std::int64_t row) HWY_ATTR {
        const float shift = core::shift_of(rows, row), scale = rows.scale[row];
        const VF shifts = hn::Set(d, shift), scales = hn::Set(d, scale);
        std::int64_t i = first;
        for (; i + lanes <= first + n; i += lanes)
          hn::StoreU(scaled(load_floats(d, source + i), shifts, scales), d, values + i);
        for (; i < first + n; ++i)
          values[i] = core::scaled(core::to_float(source[i]), shift, scale);
      },
      [&](std::int64_t first, std::int64_t n, std::int64_t row) HWY_ATTR {
        std::int64_t i = 0;
        for (; i + lanes <= n; i += lanes) {
          const VF shifts =
              rows.shift == nullptr ? hn::Zero(d) : hn::LoadU(d, rows.shift + row + i);
          const VF x = load_floats(d, source + first + i);
          hn::StoreU(scaled(x, shifts, hn::LoadU(d, rows.scale + row + i)), d, values + first + i);
        }
        for (; i < n; ++i)
          values[first + i] = core::scaled(core::to_float(source[first + i]),
                                           core::shift_of(rows, row + i), rows.scale[row + i]);
      });
}

// Restored values as elements. What a statistic that is no number makes of them is left to the
// scalar conversion, as the vector ones know finite numbers only.
template <typename T>
HWY_INLINE void put_restored(DF d, VF x, T* destination) {
  const VF limit = hn::Set(d, sizeof(T) == 2 ? 3e38f : FLT_MAX);
  if (sizeof(T) == 4 || hn::AllTrue(d, hn::Le(hn::Abs(x), limit))) {
    store_elements<false>(d, x, destination);
    return;
  }
  HWY_ALIGN float each[16];
  hn::Store(x, d, each);
  for (std::size_t i = 0; i < hn::Lanes(d); ++i) destination[i] = core::from_float<T>(each[i]);
}

// x = y * (1 / scale) + shift, or without kInverse y * scale + shift.
template <bool kInverse, typename T>
void restore_elements(const RowAffine& rows, const float* values, std::int64_t element,
                      std::int64_t count, T* destination) {
  const DF d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto factor_of = [&](std::int64_t row) {
    return kInverse ? 1.0f / rows.scale[row] : rows.scale[row];
  };
  for_stretches(
      rows, element, count,
      [&](std::int64_t first, std::int64_t n, std::int64_t row) HWY_ATTR {
        const float shift = core::shift_of(rows, row), factor = factor_of(row);
        const VF shifts = hn::Set(d, shift), factors = hn::Set(d, factor);
        std::int64_t i = first;
        for (; i + lanes <= first + n; i += lanes)
          put_restored(d, restored(hn::LoadU(d, values + i), shifts, factors), destination + i);
        for (; i < first + n; ++i)
          destination[i] = core::from_float<T>(core::restored(values[i], shift, factor));
      },
      [&](std::int64_t first, std::int64_t n, std::int64_t row) HWY_ATTR {
        std::int64_t i = 0;
        for (; i + lanes <= n; i += lanes) {
          const VF shifts =
              rows.shift == nullptr ? hn::Zero(d) : hn::LoadU(d, rows.shift + row + i);
          VF factors = hn::LoadU(d, rows.scale + row + i);
          if constexpr (kInverse) factors = hn::Div(hn::Set(d, 1.0f), factors);
          const VF y = hn::LoadU(d, values + first + i);
          put_restored(d, restored(y, shifts, factors), destination + first + i);
        }
        for (; i < n; ++i)
          destination[first + i] = core::from_float<T>(
              core::restored(values[first + i], core::shift_of(rows, row + i), factor_of(row + i)));
      });
}

}  // namespace HWY_NAMESPACE
}  // namespace backfold::cpu
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET

#endif  // BACKFOLD_GROUP_SIMD_ROWS_INL_H_
