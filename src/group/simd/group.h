// SPDX-License-Identifier: Apache-2.0
//
// SIMD kernels of the group quantizer.

#ifndef BACKFOLD_GROUP_SIMD_GROUP_H_
#define BACKFOLD_GROUP_SIMD_GROUP_H_

#include <cstdint>

#include "backfold/group.h"
#include "base/rng.h"

namespace backfold::cpu {

struct GroupKernels {
  std::int64_t target;  // Highway's bit of the one they were compiled for
  // Packs groups [begin, end) of a tensor. Arguments have been checked.
  void (*pack)(const GroupFormat& format, const void* source, core::MixedKey key, void* payload,
               std::int64_t begin, std::int64_t end);
  // Restores groups [begin, end).
  void (*unpack)(const GroupFormat& format, const void* payload, void* destination,
                 std::int64_t begin, std::int64_t end);
  // Packs a whole flat tensor into headers and codes that lie anywhere. Its first group draws as
  // number `first_group` of a larger tensor.
  void (*pack_run)(const GroupFormat& format, const void* source, core::MixedKey key,
                   std::int64_t first_group, std::uint32_t* headers, std::uint8_t* codes);
  // Restores it.
  void (*unpack_run)(const GroupFormat& format, const std::uint32_t* headers,
                     const std::uint8_t* codes, void* destination);
  // As pack() and unpack(), with values scaled by row.
  void (*pack_rows)(const GroupFormat& format, const RowAffine& rows, const void* source,
                    core::MixedKey key, void* payload, std::int64_t begin, std::int64_t end);
  void (*unpack_rows)(const GroupFormat& format, const RowAffine& rows, const void* payload,
                      void* destination, std::int64_t begin, std::int64_t end);
};

// The kernels of a SIMD target, by Highway's bit.
GroupKernels group_kernels(std::int64_t target_bit);

}  // namespace backfold::cpu

#endif  // BACKFOLD_GROUP_SIMD_GROUP_H_
