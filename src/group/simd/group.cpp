// SPDX-License-Identifier: Apache-2.0
//
// Group quantizer, SIMD. Per target: the -inl.h files have the kernels of a group, this file walks
// over groups and hands those off the fast path to the reference.

#include "group/simd/group.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "group/simd/group.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/targets.h"
#include "group/geometry.h"
#include "group/reference.h"

// After foreach_target.h: compiled again for each target.
#include "base/simd/transpose-inl.h"
#include "group/simd/draw-inl.h"
#include "group/simd/range-inl.h"
#include "group/simd/rotation-inl.h"
#include "group/simd/rows-inl.h"
#include "group/simd/unpack-inl.h"

HWY_BEFORE_NAMESPACE();
namespace backfold::cpu {
namespace HWY_NAMESPACE {
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128

// Never chosen (targets.cpp): the reference serves machines without SIMD.
GroupKernels Kernels() { return {}; }

#else

template <typename T>
class Packer {
 public:
  Packer(const GroupFormat& format, core::MixedKey key, const Run& run)
      : format_(format),
        geometry_(format),
        key_(key),
        run_(run),
        levels_(core::levels_for(format.bits, format.zero_exact, false)) {}

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

  void pack_tile(const T* tile, int columns, int count, std::int64_t first) {
    if (count == kTileRows) return pack(tile, columns, first);
    for (int i = 0; i < columns; ++i) pack_alone(tile + i * kTileRows, count, first + i);
  }

  // Packs one group of any size and content.
  void pack_alone(const T* source, int count, std::int64_t group) {
    std::uint8_t* const codes = codes_of(group);
    if (!is_constant(source, count)) {
      core::reference_pack_group(format_, source, 1, count, key_, number_of(group),
                                 run_.headers + group, codes);
      return;
    }
    run_.headers[group] = core::kExponentMask;
    std::memset(codes, 0, geometry_.code_bytes);
    const double value = core::to_double(*source);
    std::memcpy(codes, &value, sizeof(value));
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
    for (std::uint32_t rest = rotated ? plain : plain & rounding.single; rest != 0;
         rest &= rest - 1) {
      const int i = std::countr_zero(rest);
      if (is_constant(source + i * format_.group, format_.group)) plain &= ~(1u << i);
    }
    for (int i = 0; i < groups;) {
      const int run = std::countr_one(plain >> i);
      if (run == 0) {
        pack_alone(source + i * format_.group, format_.group, first + i);
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
  HWY_ALIGN float buffer_[kBatch * 256];
};

template <typename T>
void PackTyped(const GroupFormat& format, const T* source, core::MixedKey key, const Run& run,
               std::int64_t begin, std::int64_t end) {
  Packer<T> packer(format, key, run);
  if (format.layout != Layout::kStrided) {
    const std::int64_t whole = std::min(end, format.count / format.group);
    for (std::int64_t group = begin; group < whole; group += kBatch)
      packer.pack(source + group * format.group,
                  static_cast<int>(std::min<std::int64_t>(kBatch, whole - group)), group);
    if (whole < end) {
      const core::GroupSpan last = core::span_of(format, whole);
      packer.pack_alone(source + last.offset, last.count, whole);
    }
    return;
  }
  HWY_ALIGN T tile[kTileColumns][kTileRows];
  for_tiles(format, begin, end, [&](std::int64_t group, int columns, const core::GroupSpan& span) {
    transpose(source + span.offset, span.stride, span.count, columns, tile[0], kTileRows);
    packer.pack_tile(tile[0], columns, span.count, group);
  });
}

template <typename T>
void UnpackTyped(const GroupFormat& format, const Run& run, T* destination, std::int64_t begin,
                 std::int64_t end) {
  Unpacker<T> unpacker(format, run, destination);
  if (format.layout != Layout::kStrided) {
    for (std::int64_t group = begin; group < end; ++group) {
      const core::GroupSpan span = core::span_of(format, group);
      unpacker.unpack(group, destination + span.offset, span.count);
    }
    return;
  }
  HWY_ALIGN T tile[kTileColumns][kTileRows];
  for_tiles(format, begin, end, [&](std::int64_t group, int columns, const core::GroupSpan& span) {
    for (int column = 0; column < columns; ++column)
      unpacker.unpack(group + column, tile[column], span.count);
    transpose(tile[0], kTileRows, columns, span.count, destination + span.offset, span.stride);
  });
}

// Values scaled by row pass through memory that stays in the first-level cache.
template <typename T>
void PackRowsTyped(const GroupFormat& format, const RowAffine& rows, const T* source,
                   core::MixedKey key, const Run& run, std::int64_t begin, std::int64_t end) {
  const GroupFormat of_values = core::format_of_values(format);
  Packer<float> packer(of_values, key, run);
  constexpr int kGroup = 128;
  if (format.layout != Layout::kStrided) {
    HWY_ALIGN float values[kBatch][kGroup];
    for (std::int64_t group = begin; group < end; group += kBatch) {
      const std::int64_t first = group * kGroup;
      const std::int64_t last = std::min((std::min(end, group + kBatch)) * kGroup, format.count);
      scale_elements(rows, source + first, first, last - first, values[0]);
      const int whole = static_cast<int>((last - first) / kGroup);
      if (whole > 0) packer.pack(values[0], whole, group);
      const int rest = static_cast<int>((last - first) % kGroup);
      if (rest > 0) packer.pack_alone(values[whole], rest, group + whole);
    }
    return;
  }
  HWY_ALIGN float across[kTileRows][kTileColumns];
  HWY_ALIGN float tile[kTileColumns][kTileRows];
  for_tiles(format, begin, end, [&](std::int64_t group, int columns, const core::GroupSpan& span) {
    for (int row = 0; row < span.count; ++row) {
      const std::int64_t element = span.offset + row * span.stride;
      scale_elements(rows, source + element, element, columns, across[row]);
    }
    transpose(across[0], kTileColumns, span.count, columns, tile[0], kTileRows);
    packer.pack_tile(tile[0], columns, span.count, group);
  });
}

template <typename T>
void UnpackRowsTyped(const GroupFormat& format, const RowAffine& rows, const Run& run,
                     T* destination, std::int64_t begin, std::int64_t end) {
  for_values(format, run, begin, end, [&](float* values, std::int64_t element, int count) {
    restore_elements<true>(rows, values, element, count, destination + element);
  });
}

void PackRows(const GroupFormat& format, const RowAffine& rows, const void* source,
              core::MixedKey key, void* payload, std::int64_t begin, std::int64_t end) {
  core::with_element(format.type, [&]<typename T>() HWY_ATTR {
    if constexpr (sizeof(T) < 8)
      PackRowsTyped(format, rows, static_cast<const T*>(source), key, run_of(format, payload),
                    begin, end);
  });
}

void UnpackRows(const GroupFormat& format, const RowAffine& rows, const void* payload,
                void* destination, std::int64_t begin, std::int64_t end) {
  core::with_element(format.type, [&]<typename T>() HWY_ATTR {
    if constexpr (sizeof(T) < 8)
      UnpackRowsTyped(format, rows, run_of(format, payload), static_cast<T*>(destination), begin,
                      end);
  });
}

void PackGroups(const GroupFormat& format, const void* source, core::MixedKey key, const Run& run,
                std::int64_t begin, std::int64_t end) {
  core::with_element(format.type, [&]<typename T>() HWY_ATTR {
    PackTyped(format, static_cast<const T*>(source), key, run, begin, end);
  });
}

void UnpackGroups(const GroupFormat& format, const Run& run, void* destination, std::int64_t begin,
                  std::int64_t end) {
  core::with_element(format.type, [&]<typename T>() HWY_ATTR {
    UnpackTyped(format, run, static_cast<T*>(destination), begin, end);
  });
}

void Pack(const GroupFormat& format, const void* source, core::MixedKey key, void* payload,
          std::int64_t begin, std::int64_t end) {
  PackGroups(format, source, key, run_of(format, payload), begin, end);
}

void Unpack(const GroupFormat& format, const void* payload, void* destination, std::int64_t begin,
            std::int64_t end) {
  UnpackGroups(format, run_of(format, payload), destination, begin, end);
}

void PackRun(const GroupFormat& format, const void* source, core::MixedKey key,
             std::int64_t first_group, std::uint32_t* headers, std::uint8_t* codes) {
  PackGroups(format, source, key, {headers, codes, first_group}, 0,
             core::GroupGeometry(format).groups);
}

void UnpackRun(const GroupFormat& format, const std::uint32_t* headers, const std::uint8_t* codes,
               void* destination) {
  const Run run{const_cast<std::uint32_t*>(headers), const_cast<std::uint8_t*>(codes), 0};
  UnpackGroups(format, run, destination, 0, core::GroupGeometry(format).groups);
}

GroupKernels Kernels() {
  return {HWY_TARGET, &Pack, &Unpack, &PackRun, &UnpackRun, &PackRows, &UnpackRows};
}

#endif  // HWY_TARGET
}  // namespace HWY_NAMESPACE
}  // namespace backfold::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace backfold::cpu {

HWY_EXPORT(Kernels);

GroupKernels group_kernels(std::int64_t target_bit) {
  return BACKFOLD_KERNELS_FOR(Kernels, target_bit)();
}

}  // namespace backfold::cpu
#endif  // HWY_ONCE
