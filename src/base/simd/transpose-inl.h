// SPDX-License-Identifier: Apache-2.0
//
// Transposes a small matrix, for the SIMD target being compiled: columns of a strided tensor become
// contiguous groups, and back.

#if defined(BACKFOLD_BASE_SIMD_TRANSPOSE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BACKFOLD_BASE_SIMD_TRANSPOSE_INL_H_
#undef BACKFOLD_BASE_SIMD_TRANSPOSE_INL_H_
#else
#define BACKFOLD_BASE_SIMD_TRANSPOSE_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>

#include "base/simd/elements-inl.h"

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
HWY_BEFORE_NAMESPACE();
namespace backfold::cpu {
namespace HWY_NAMESPACE {

// A square block of one 16-byte vector a row. Interleaving each row with the one half the block
// further down moves every element to the place that its index, rotated by one bit, names; as many
// rounds as the side has bits swap rows and columns.
HWY_INLINE void transpose_block(const std::uint32_t* from, std::int64_t from_stride,
                                std::uint32_t* to, std::int64_t to_stride) {
  const hn::FixedTag<std::uint32_t, 4> d;
  auto a = hn::LoadU(d, from), b = hn::LoadU(d, from + from_stride);
  auto c = hn::LoadU(d, from + 2 * from_stride), e = hn::LoadU(d, from + 3 * from_stride);
  for (int round = 0; round < 2; ++round) {
    const auto a1 = hn::InterleaveLower(d, a, c), b1 = hn::InterleaveUpper(d, a, c);
    const auto c1 = hn::InterleaveLower(d, b, e), e1 = hn::InterleaveUpper(d, b, e);
    a = a1, b = b1, c = c1, e = e1;
  }
  hn::StoreU(a, d, to);
  hn::StoreU(b, d, to + to_stride);
  hn::StoreU(c, d, to + 2 * to_stride);
  hn::StoreU(e, d, to + 3 * to_stride);
}

HWY_INLINE void transpose_block(const std::uint16_t* from, std::int64_t from_stride,
                                std::uint16_t* to, std::int64_t to_stride) {
  const hn::FixedTag<std::uint16_t, 8> d;
  auto r0 = hn::LoadU(d, from), r1 = hn::LoadU(d, from + from_stride);
  auto r2 = hn::LoadU(d, from + 2 * from_stride), r3 = hn::LoadU(d, from + 3 * from_stride);
  auto r4 = hn::LoadU(d, from + 4 * from_stride), r5 = hn::LoadU(d, from + 5 * from_stride);
  auto r6 = hn::LoadU(d, from + 6 * from_stride), r7 = hn::LoadU(d, from + 7 * from_stride);
  for (int round = 0; round < 3; ++round) {
    const auto s0 = hn::InterleaveLower(d, r0, r4), s1 = hn::InterleaveUpper(d, r0, r4);
    const auto s2 = hn::InterleaveLower(d, r1, r5), s3 = hn::InterleaveUpper(d, r1, r5);
    const auto s4 = hn::InterleaveLower(d, r2, r6), s5 = hn::InterleaveUpper(d, r2, r6);
    const auto s6 = hn::InterleaveLower(d, r3, r7), s7 = hn::InterleaveUpper(d, r3, r7);
    r0 = s0, r1 = s1, r2 = s2, r3 = s3, r4 = s4, r5 = s5, r6 = s6, r7 = s7;
  }
  hn::StoreU(r0, d, to);
  hn::StoreU(r1, d, to + to_stride);
  hn::StoreU(r2, d, to + 2 * to_stride);
  hn::StoreU(r3, d, to + 3 * to_stride);
  hn::StoreU(r4, d, to + 4 * to_stride);
  hn::StoreU(r5, d, to + 5 * to_stride);
  hn::StoreU(r6, d, to + 6 * to_stride);
  hn::StoreU(r7, d, to + 7 * to_stride);
}

// The integers that move elements of a type.
template <typename T>
struct Carrier {
  using Type = std::uint16_t;
};
template <>
struct Carrier<float> {
  using Type = std::uint32_t;
};
template <>
struct Carrier<double> {
  using Type = std::uint64_t;
};

// to[column][row] = from[row][column]
template <typename T>
void transpose(const T* from, std::int64_t from_stride, int rows, int columns, T* to,
               std::int64_t to_stride) {
  using U = typename Carrier<T>::Type;
  const U* source = reinterpret_cast<const U*>(from);
  U* destination = reinterpret_cast<U*>(to);
  // The part that whole blocks cover.
  int block_rows = 0, block_columns = 0;
  if constexpr (sizeof(T) < 8) {
    constexpr int kSide = 16 / sizeof(T);
    block_rows = rows / kSide * kSide;
    block_columns = columns / kSide * kSide;
    const auto move = [&](int row, int column) HWY_ATTR {
      transpose_block(source + row * from_stride + column, from_stride,
                      destination + column * to_stride + row, to_stride);
    };
    // Whichever side has its rows further apart is walked through row by row: a tensor's rows may
    // all fall into one set of the cache, which would drop a line before the next block is put into
    // it.
    if (from_stride > to_stride) {
      for (int row = 0; row < block_rows; row += kSide)
        for (int column = 0; column < block_columns; column += kSide) move(row, column);
    } else {
      for (int column = 0; column < block_columns; column += kSide)
        for (int row = 0; row < block_rows; row += kSide) move(row, column);
    }
  }
  for (int row = 0; row < rows; ++row)
    for (int column = row < block_rows ? block_columns : 0; column < columns; ++column)
      destination[column * to_stride + row] = source[row * from_stride + column];
}

}  // namespace HWY_NAMESPACE
}  // namespace backfold::cpu
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET

#endif  // BACKFOLD_BASE_SIMD_TRANSPOSE_INL_H_
