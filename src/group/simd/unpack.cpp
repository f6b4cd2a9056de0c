// SPDX-License-Identifier: Apache-2.0
//
// Group quantizer, SIMD: unpacking. Per target: the -inl.h files have the kernels of a group, this
// file walks over groups.

#include "group/simd/group.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "group/simd/unpack.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "base/targets.h"
#include "group/geometry.h"

// After foreach_target.h: compiled again for each target.
#include "group/simd/rows-inl.h"
#include "group/simd/unpack-inl.h"

HWY_BEFORE_NAMESPACE();
namespace backfold::cpu {
namespace HWY_NAMESPACE {
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128

// Never chosen (targets.cpp): the reference serves machines without SIMD.
GroupUnpackers Unpackers() { return {}; }

#else

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
  const auto restore = [&](std::int64_t group, int columns, const core::GroupSpan& span) {
    unpacker.unpack_tile(group, columns, span.count, destination + span.offset, span.stride);
  };
  for_tiles(format, kSpanColumns, begin, end, restore);
}

template <typename T>
void UnpackRowsTyped(const GroupFormat& format, const RowAffine& rows, const Run& run,
                     T* destination, std::int64_t begin, std::int64_t end) {
  for_values(format, run, begin, end, [&](float* values, std::int64_t element, int count) {
    restore_elements<true>(rows, values, element, count, destination + element);
  });
}

void UnpackGroups(const GroupFormat& format, const Run& run, void* destination, std::int64_t begin,
                  std::int64_t end) {
  core::with_element(format.type, [&]<typename T>() HWY_ATTR {
    UnpackTyped(format, run, static_cast<T*>(destination), begin, end);
  });
}

void Unpack(const GroupFormat& format, const void* payload, void* destination, std::int64_t begin,
            std::int64_t end) {
  UnpackGroups(format, run_of(format, payload), destination, begin, end);
}

void UnpackRun(const GroupFormat& format, const std::uint32_t* headers, const std::uint8_t* codes,
               void* destination) {
  const Run run{const_cast<std::uint32_t*>(headers), const_cast<std::uint8_t*>(codes), 0};
  UnpackGroups(format, run, destination, 0, core::GroupGeometry(format).groups);
}

void UnpackRows(const GroupFormat& format, const RowAffine& rows, const void* payload,
                void* destination, std::int64_t begin, std::int64_t end) {
  core::with_element(format.type, [&]<typename T>() HWY_ATTR {
    if constexpr (sizeof(T) < 8)
      UnpackRowsTyped(format, rows, run_of(format, payload), static_cast<T*>(destination), begin,
                      end);
  });
}

GroupUnpackers Unpackers() { return {HWY_TARGET, &Unpack, &UnpackRun, &UnpackRows}; }

#endif  // HWY_TARGET
}  // namespace HWY_NAMESPACE
}  // namespace backfold::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace backfold::cpu {

HWY_EXPORT(Unpackers);

GroupUnpackers group_unpackers(std::int64_t target_bit) {
  return BACKFOLD_KERNELS_FOR(Unpackers, target_bit)();
}

}  // namespace backfold::cpu
#endif  // HWY_ONCE
