// SPDX-License-Identifier: Apache-2.0
//
// Reduces many vectors at a time, for the SIMD target being compiled.

#if defined(BACKFOLD_BASE_SIMD_REDUCE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BACKFOLD_BASE_SIMD_REDUCE_INL_H_
#undef BACKFOLD_BASE_SIMD_REDUCE_INL_H_
#else
#define BACKFOLD_BASE_SIMD_REDUCE_INL_H_
#endif

#include <hwy/highway.h>

#include "base/simd/elements-inl.h"

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
HWY_BEFORE_NAMESPACE();
namespace backfold::cpu {
namespace HWY_NAMESPACE {

// Rows of one vector each, as many as a 16-byte block has lanes or a fraction of that. In every
// block of the result each row has `lanes of a block / kRows` lanes, next to the other rows'.
template <int kRows, class D, typename Operation>
HWY_INLINE hn::Vec<D> reduce_in_blocks(D d, const hn::TFromD<D>* rows, Operation operation) {
  if constexpr (kRows == 1) {
    return hn::Load(d, rows);
  } else {
    constexpr int kHalf = kRows / 2;
    const auto a = reduce_in_blocks<kHalf>(d, rows, operation);
    const auto b = reduce_in_blocks<kHalf>(d, rows + kHalf * hn::MaxLanes(d), operation);
    // The rows that a vector holds already stay together.
    const hn::Repartition<hwy::UnsignedFromSize<kHalf * sizeof(hn::TFromD<D>)>, D> unit;
    const auto a_units = hn::BitCast(unit, a), b_units = hn::BitCast(unit, b);
    return operation(hn::BitCast(d, hn::InterleaveLower(unit, a_units, b_units)),
                     hn::BitCast(d, hn::InterleaveUpper(unit, a_units, b_units)));
  }
}

// As many rows as a vector has lanes, of one vector each: lane i of the result is row i, reduced.
// A row costs about two shuffles and an operation; by itself it would take as many per halving.
template <class D, typename Operation>
HWY_INLINE hn::Vec<D> reduce_rows(D d, const hn::TFromD<D>* rows, Operation operation) {
  constexpr int kLanes = hn::MaxLanes(D());
  constexpr int kBlock = 16 / sizeof(hn::TFromD<D>);
  const auto block = [&](int index) HWY_ATTR {
    return reduce_in_blocks<kBlock>(d, rows + index * kBlock * kLanes, operation);
  };
  if constexpr (kLanes == kBlock) {
    return block(0);
  } else {
    const auto halves = [&](hn::Vec<D> low, hn::Vec<D> high) HWY_ATTR {
      return operation(hn::ConcatLowerLower(d, high, low), hn::ConcatUpperUpper(d, high, low));
    };
    if constexpr (kLanes == 2 * kBlock) {
      return halves(block(0), block(1));
    } else {
      static_assert(kLanes == 4 * kBlock);
      const auto even = halves(block(0), block(2)), odd = halves(block(1), block(3));
      return operation(hn::OddEvenBlocks(odd, even),
                       hn::SwapAdjacentBlocks(hn::OddEvenBlocks(even, odd)));
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace backfold::cpu
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET

#endif  // BACKFOLD_BASE_SIMD_REDUCE_INL_H_
