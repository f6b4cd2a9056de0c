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
#include <type_traits>

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

  // Packs up to kBatch groups of `count` elements. source(i) points at the contiguous elements of
  // the i-th, which is group number `first` + i.
  template <typename Source>
  void pack(Source source, int groups, int count, std::int64_t first) {
    // fp64 elements may be positive and round to zero: the reference tells them apart.
    const bool fast = count == format_.group && !(sizeof(T) == 8 && format_.zero_exact);
    const float* values[kBatch];
    bool plain[kBatch] = {};
    RangeBatch ranges;
    for (int i = 0; fast && i < groups; ++i) plain[i] = read(source(i), i, ranges, &values[i]);
    const bool room = round_outward(ranges, groups, levels_, format_.layout == Layout::kRotated);

    GroupDraw draws[kBatch];
    int drawn = 0;
    for (int i = 0; i < groups; ++i) {
      const std::int64_t group = first + i;
      std::uint8_t* codes = run_.codes + static_cast<std::size_t>(group) * geometry_.code_bytes;
      if (plain[i]) {
        run_.headers[group] = ranges.header[i];
        draws[drawn++] = {values[i], codes, ranges.base[i], ranges.inverse[i],
                          first_block_of(group)};
      } else {
        core::reference_pack_group(format_, source(i), 1, count, key_, number_of(group),
                                   run_.headers + group, codes);
      }
    }
    draw_codes(format_.bits, format_.zero_exact, format_.group, !room,
               {draws, drawn, levels_, key_.second});
  }

 private:
  // Reads a group's values, rotates them if the layout asks for it, and finds their range. False
  // for a group off the fast path.
  bool read(const T* source, int i, RangeBatch& ranges, const float** values) {
    Extremes extremes = read_group(source, format_.group, format_.zero_exact, buffer_[i]);
    if (!extremes.plain()) return false;
    *values = buffer_[i];
    if constexpr (std::is_same_v<T, float>) *values = source;
    if (format_.layout == Layout::kRotated) {
      rotate(*values, buffer_[i]);
      *values = buffer_[i];
      extremes = read_group(buffer_[i], core::kRotation, false, nullptr);
      if (!extremes.within_limits()) return false;
    }
    ranges.low[i] = extremes.low;
    ranges.high[i] = extremes.high;
    return true;
  }

  std::uint64_t number_of(std::int64_t group) const {
    return static_cast<std::uint64_t>(run_.first_group + group);
  }

  std::uint32_t first_block_of(std::int64_t group) const {
    const std::uint64_t block =
        number_of(group) * static_cast<std::uint64_t>(format_.group / core::kRandomBlock);
    return static_cast<std::uint32_t>(block) + core::block_offset(key_, block);
  }

  const GroupFormat& format_;
  core::GroupGeometry geometry_;
  core::MixedKey key_;
  Run run_;
  core::Levels levels_;
  HWY_ALIGN float buffer_[kBatch][256];
};

template <typename T>
void PackTyped(const GroupFormat& format, const T* source, core::MixedKey key, const Run& run,
               std::int64_t begin, std::int64_t end) {
  Packer<T> packer(format, key, run);
  if (format.layout != Layout::kStrided) {
    const std::int64_t whole = std::min(end, format.count / format.group);
    for (std::int64_t group = begin; group < whole; group += kBatch) {
      const T* first = source + group * format.group;
      packer.pack([&](int i) { return first + i * format.group; },
                  static_cast<int>(std::min<std::int64_t>(kBatch, whole - group)), format.group,
                  group);
    }
    if (whole < end) {
      const core::GroupSpan last = core::span_of(format, whole);
      packer.pack([&](int) { return source + last.offset; }, 1, last.count, whole);
    }
    return;
  }
  HWY_ALIGN T tile[kTileColumns][kTileRows];
  for_tiles(format, begin, end, [&](std::int64_t group, int columns, const core::GroupSpan& span) {
    transpose(source + span.offset, span.stride, span.count, columns, tile[0], kTileRows);
    for (int column = 0; column < columns; column += kBatch)
      packer.pack([&](int i) { return tile[column + i]; }, std::min(kBatch, columns - column),
                  span.count, group + column);
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
      if (whole > 0) packer.pack([&](int i) { return values[i]; }, whole, kGroup, group);
      const int rest = static_cast<int>((last - first) % kGroup);
      if (rest > 0) packer.pack([&](int) { return values[whole]; }, 1, rest, group + whole);
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
    for (int column = 0; column < columns; column += kBatch)
      packer.pack([&](int i) { return tile[column + i]; }, std::min(kBatch, columns - column),
                  span.count, group + column);
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
