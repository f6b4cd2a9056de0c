// SPDX-License-Identifier: Apache-2.0
//
// SIMD kernels of the group quantizer.

#ifndef BACKFOLD_CPU_GROUP_H_
#define BACKFOLD_CPU_GROUP_H_

#include <cstdint>

#include "backfold/group.h"
#include "core/rng.h"

namespace backfold::cpu {

struct GroupKernels {
  // Packs groups [begin, end) of a tensor. Arguments have been checked.
  void (*pack)(const GroupFormat& format, const void* source, core::MixedKey key, void* payload,
               std::int64_t begin, std::int64_t end);
  // Restores groups [begin, end).
  void (*unpack)(const GroupFormat& format, const void* payload, void* destination,
                 std::int64_t begin, std::int64_t end);
};

// The kernels of a SIMD target, by Highway's bit.
GroupKernels group_kernels(std::int64_t target_bit);

}  // namespace backfold::cpu

#endif  // BACKFOLD_CPU_GROUP_H_
