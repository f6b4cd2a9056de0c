// SPDX-License-Identifier: Apache-2.0
//
// SIMD kernels of the table codec. Their contracts are those of the reference
// (table/reference.h).

#ifndef BACKFOLD_TABLE_SIMD_TABLE_H_
#define BACKFOLD_TABLE_SIMD_TABLE_H_

#include <cstdint>

#include "backfold/types.h"
#include "table/code.h"

namespace backfold::cpu {

struct TableKernels {
  std::int64_t target;  // Highway's bit of the one they were compiled for
  void (*pack)(const core::TableCode& table, ElementType type, const void* source,
               std::int64_t count, std::uint8_t* low, std::uint8_t* high);
  void (*unpack)(const core::TableCode& table, ElementType type, const std::uint8_t* low,
                 const std::uint8_t* high, std::int64_t count, void* destination);
};

// The kernels of a SIMD target, by Highway's bit.
TableKernels table_kernels(std::int64_t target_bit);

}  // namespace backfold::cpu

#endif  // BACKFOLD_TABLE_SIMD_TABLE_H_
