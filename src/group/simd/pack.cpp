// SPDX-License-Identifier: Apache-2.0
//
// Group quantizer, SIMD: packing. Per target: the -inl.h files have the kernels of a group, this
// file walks over groups.

#include "group/simd/group.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "group/simd/pack.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>

#include "base/targets.h"
#include "group/geometry.h"

// After foreach_target.h: compiled again for each target.
#include "group/simd/pack-inl.h"
#include "group/simd/rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace backfold::cpu {
namespace HWY_NAMESPACE {
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128

// Never chosen (targets.cpp): the reference serves machines without SIMD.
GroupPackers Packers() { return {}; }

#else

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
  for_tiles(format, kTileColumns, begin, end,
            [&](std::int64_t group, int columns, const core::GroupSpan& span) {
              packer.pack_tile(source + span.offset, span.stride, columns, span.count, group);
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
  Tile tile;
  for_tiles(format, kTileColumns, begin, end,
            [&](std::int64_t group, int columns, const core::GroupSpan& span) {
              for (int row = 0; row < span.count; ++row) {
                const std::int64_t element = span.offset + row * span.stride;
                scale_elements(rows, source + element, element, columns, tile.rows[row]);
              }
              packer.pack_tile(tile.rows[0], kTileColumns, columns, span.count, group);
            });
}

void PackGroups(const GroupFormat& format, const void* source, core::MixedKey key, const Run& run,
                std::int64_t begin, std::int64_t end) {
  core::with_element(format.type, [&]<typename T>() HWY_ATTR {
    PackTyped(format, static_cast<const T*>(source), key, run, begin, end);
  });
}

void Pack(const GroupFormat& format, const void* source, core::MixedKey key, void* payload,
          std::int64_t begin, std::int64_t end) {
  PackGroups(format, source, key, run_of(format, payload), begin, end);
}

void PackRun(const GroupFormat& format, const void* source, core::MixedKey key,
             std::int64_t first_group, std::uint32_t* headers, std::uint8_t* codes) {
  PackGroups(format, source, key, {headers, codes, first_group}, 0,
             core::GroupGeometry(format).groups);
}

void PackRows(const GroupFormat& format, const RowAffine& rows, const void* source,
              core::MixedKey key, void* payload, std::int64_t begin, std::int64_t end) {
  core::with_element(format.type, [&]<typename T>() HWY_ATTR {
    if constexpr (sizeof(T) < 8)
      PackRowsTyped(format, rows, static_cast<const T*>(source), key, run_of(format, payload),
                    begin, end);
  });
}

GroupPackers Packers() { return {HWY_TARGET, &Pack, &PackRun, &PackRows}; }

#endif  // HWY_TARGET
}  // namespace HWY_NAMESPACE
}  // namespace backfold::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace backfold::cpu {

HWY_EXPORT(Packers);

GroupPackers group_packers(std::int64_t target_bit) {
  return BACKFOLD_KERNELS_FOR(Packers, target_bit)();
}

}  // namespace backfold::cpu
#endif  // HWY_ONCE
