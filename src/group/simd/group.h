// SPDX-License-Identifier: Apache-2.0
//
// SIMD kernels of the group quantizer.

#ifndef BACKFOLD_GROUP_SIMD_GROUP_H_
#define BACKFOLD_GROUP_SIMD_GROUP_H_

#include <cstdint>

#include "backfold/group.h"
#include "base/rng.h"

namespace backfold::cpu {

// What packs. Arguments have been checked.
struct GroupPackers {
  std::int64_t target;  // Highway's bit of the one they were compiled for
  // Groups [begin, end) of a tensor.
  void (*pack)(const GroupFormat& format, const void* source, core::MixedKey key, void* payload,
               std::int64_t begin, std::int64_t end);
  // A whole flat tensor, into headers and codes that lie anywhere. Its first group draws as number
  // `first_group` of a larger tensor.
  void (*pack_run)(const GroupFormat& format, const void* source, core::MixedKey key,
                   std::int64_t first_group, std::uint32_t* headers, std::uint8_t* codes);
  // As pack(), with values scaled by row.
  void (*pack_rows)(const GroupFormat& format, const RowAffine& rows, const void* source,
                    core::MixedKey key, void* payload, std::int64_t begin, std::int64_t end);
};

// What restores the same.
struct GroupUnpackers {
  std::int64_t target;
  void (*unpack)(const GroupFormat& format, const void* payload, void* destination,
                 std::int64_t begin, std::int64_t end);
  void (*unpack_run)(const GroupFormat& format, const std::uint32_t* headers,
                     const std::uint8_t* codes, void* destination);
  void (*unpack_rows)(const GroupFormat& format, const RowAffine& rows, const void* payload,
                      void* destination, std::int64_t begin, std::int64_t end);
};

// The kernels of a SIMD target, by Highway's bit.
GroupPackers group_packers(std::int64_t target_bit);
GroupUnpackers group_unpackers(std::int64_t target_bit);

}  // namespace backfold::cpu

#endif  // BACKFOLD_GROUP_SIMD_GROUP_H_
