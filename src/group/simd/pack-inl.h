// SPDX-License-Identifier: Apache-2.0
//
// Packs groups in batches, for the SIMD target being compiled. Those off the fast path go to the
// reference.

#if defined(BACKFOLD_GROUP_SIMD_PACK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BACKFOLD_GROUP_SIMD_PACK_INL_H_
#undef BACKFOLD_GROUP_SIMD_PACK_INL_H_
#else
#define BACKFOLD_GROUP_SIMD_PACK_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/arithmetic.h"
#include "base/rng.h"
#include "group/geometry.h"
#include "group/reference.h"
#include "group/simd/columns-inl.h"
#include "group/simd/draw-inl.h"
#include "group/simd/range-inl.h"
#include "group/simd/rotation-inl.h"
#include "group/simd/unpack-inl.h"

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
HWY_BEFORE_NAMESPACE();
namespace backfold::cpu {
namespace HWY_NAMESPACE {

template <typename T>
class Packer {
 public:
  Packer(const GroupFormat& format, core::MixedKey key, const Run& run)
      : format_(format),
        geometry_(format),
        key_(key),
        run_(run),
        levels_(core::levels_for(format.bits, format.zero_exact, false)),
        large_(format.count * static_cast<std::int64_t>(sizeof(T)) >= kLargeBytes) {}

  // Packs up to kBatch whole groups that follow each other, number `first` the first.
  void pack(const T* source, int groups, std::int64_t first) {
    if (format_.layout == Layout::kRotated) {
      for (int i = 0; i < groups * core::kRotation; i += core::kRotation)
        rotate(source + i, buffer_ + i);
      pack_values(source, buffer_, groups, first);
    } else if constexpr (sizeof(T) == 8) {
      narrow_elements(source, groups * format_.group, buffer_);
      pack_values(source, buffer_, groups, first);
    } else {
      pack_values(source, source, groups, first);
    }
  }

  // Packs up to kTileColumns neighbouring columns of `count` rows, `stride` apart; number `first`
  // the first.
  void pack_tile(const T* source, std::int64_t stride, int columns, int count, std::int64_t first) {
    RangeBatch ranges;
    const std::uint32_t finite = format_.zero_exact
                                     ? read_tile<true>(source, stride, columns, count, ranges)
                                     : read_tile<false>(source, stride, columns, count, ranges);
    const Rounding rounding = round_outward(ranges, columns, levels_, false);
    std::uint32_t plain = finite & rounding.within_limits;
    // fp64 elements may be positive and round to zero: the reference tells them apart.
    if (sizeof(T) == 8 && format_.zero_exact) plain = 0;
    const std::uint32_t single = plain & rounding.single;
    // Where fp64 elements look the same as fp32, the reference has a closer look.
    const std::uint32_t constant =
        sizeof(T) == 8 || single == 0 ? 0 : single & same_columns(tile_, count);
    plain &= ~(sizeof(T) == 8 ? single : constant);
    if (plain != 0) {
      std::copy_n(ranges.header, columns, run_.headers + first);
      HWY_ALIGN std::uint32_t blocks[kTileColumns] = {};
      for (int i = 0; i < columns; ++i) {
        const std::uint64_t block = first_block_of(first + i);
        blocks[i] = static_cast<std::uint32_t>(block) + core::block_offset(key_, block);
      }
      draw_columns(format_, rounding.clamp,
                   {&tile_, count, columns, &ranges, blocks, codes_of(first), key_.second,
                    levels_.ceiling, large_ ? later_rows(source, stride, first) : nullptr,
                    kTileRows / kAheadTiles, stride * static_cast<std::ptrdiff_t>(sizeof(T))});
    }
    for (std::uint32_t rest = ~plain & ((1u << columns) - 1u); rest != 0; rest &= rest - 1) {
      const int i = std::countr_zero(rest);
      if ((constant >> i & 1u) != 0)
        put_constant(source[i], first + i);
      else
        pack_reference(source + i, stride, count, first + i);
    }
  }

  // Packs one group of any size and content.
  void pack_alone(const T* source, int count, std::int64_t group) {
    if (is_constant(source, count))
      put_constant(*source, group);
    else
      pack_reference(source, 1, count, group);
  }

 private:
  // Packs groups whose codes are drawn from `values`.
  template <typename Value>
  void pack_values(const T* source, const Value* values, int groups, std::int64_t first) {
    RangeBatch ranges;
    const bool rotated = format_.layout == Layout::kRotated;
    const std::uint32_t known =
        find_extremes(format_.zero_exact, format_.group, values, groups, ranges);
    const Rounding rounding = round_outward(ranges, groups, levels_, rotated);
    std::uint32_t plain = known & rounding.within_limits;
    // fp64 elements may be positive and round to zero: the reference tells them apart.
    if (sizeof(T) == 8 && format_.zero_exact) plain = 0;
    std::uint32_t constant = 0;
    for (std::uint32_t rest = rotated ? plain : plain & rounding.single; rest != 0;
         rest &= rest - 1) {
      const int i = std::countr_zero(rest);
      if (is_constant(source + i * format_.group, format_.group)) constant |= 1u << i;
    }
    plain &= ~constant;
    for (int i = 0; i < groups;) {
      const int run = std::countr_one(plain >> i);
      if (run == 0) {
        const T* const group = source + i * format_.group;
        if ((constant >> i & 1u) != 0)
          put_constant(*group, first + i);
        else
          pack_alone(group, format_.group, first + i);
        ++i;
        continue;
      }
      std::copy(ranges.header + i, ranges.header + i + run, run_.headers + first + i);
      draw_codes<Value>(format_, rounding.clamp,
                        {values + i * format_.group, run, ranges.base + i, ranges.inverse + i,
                         codes_of(first + i), first_block_of(first + i), key_, levels_});
      i += run;
    }
  }

  template <bool kPositiveOnly>
  HWY_INLINE std::uint32_t read_tile(const T* source, std::int64_t stride, int columns, int count,
                                     RangeBatch& ranges) {
    const DF d;
    constexpr int kLanes = hn::MaxLanes(DF());
    if (columns == kTileColumns)
      return read_columns<kPositiveOnly, kTileColumns / kLanes>(
          [&](int row, int column)
              HWY_ATTR { return load_floats(d, source + row * stride + column); },
          0, count, tile_, ranges);
    std::uint32_t finite = 0;
    for (int first = 0; first < columns; first += kLanes) {
      const auto there = static_cast<std::size_t>(std::min(kLanes, columns - first));
      T padded[kLanes] = {};
      finite |= read_columns<kPositiveOnly, 1>(
          [&](int row, int column) HWY_ATTR {
            std::memcpy(padded, source + row * stride + column, there * sizeof(T));
            return load_floats(d, padded);
          },
          first, count, tile_, ranges);
    }
    return finite;
  }

  void put_constant(T element, std::int64_t group) {
    const double value = core::to_double(element);
    std::uint8_t* const codes = codes_of(group);
    run_.headers[group] = core::kExponentMask;
    std::memset(codes, 0, geometry_.code_bytes);
    std::memcpy(codes, &value, sizeof(value));
  }

  void pack_reference(const T* source, std::int64_t stride, int count, std::int64_t group) {
    core::reference_pack_group(format_, source, stride, count, key_, number_of(group),
                               run_.headers + group, codes_of(group));
  }

  // Each tile fetches its share of the rows of the next kAheadTiles.
  static constexpr int kAheadTiles = kAheadBytes / (kTileColumns * static_cast<int>(sizeof(T)));
  const std::byte* later_rows(const T* source, std::int64_t stride, std::int64_t first) const {
    const std::int64_t tile = first % format_.columns / kTileColumns % kAheadTiles;
    const T* const later = source + (kAheadTiles - tile) * kTileColumns;
    return reinterpret_cast<const std::byte*>(later + tile * (kTileRows / kAheadTiles) * stride);
  }

  static bool is_constant(const T* source, int count) {
    return std::memcmp(source, source + count - 1, sizeof(T)) == 0 &&
           std::memcmp(source, source + 1, static_cast<std::size_t>(count - 1) * sizeof(T)) == 0;
  }

  std::uint8_t* codes_of(std::int64_t group) const {
    return run_.codes + static_cast<std::size_t>(group) * geometry_.code_bytes;
  }

  std::uint64_t number_of(std::int64_t group) const {
    return static_cast<std::uint64_t>(run_.first_group + group);
  }

  std::uint64_t first_block_of(std::int64_t group) const {
    return number_of(group) * static_cast<std::uint64_t>(format_.group / core::kRandomBlock);
  }

  const GroupFormat& format_;
  core::GroupGeometry geometry_;
  core::MixedKey key_;
  Run run_;
  core::Levels levels_;
  bool large_;
  HWY_ALIGN float buffer_[kBatch * 256];  // values that are not the source's elements
  Tile tile_;
};

}  // namespace HWY_NAMESPACE
}  // namespace backfold::cpu
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET

#endif  // BACKFOLD_GROUP_SIMD_PACK_INL_H_
