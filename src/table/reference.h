// SPDX-License-Identifier: Apache-2.0
//
// The table codec as plain loops: what every other backend must agree with.

#ifndef BACKFOLD_TABLE_REFERENCE_H_
#define BACKFOLD_TABLE_REFERENCE_H_

#include <cstdint>

#include "backfold/types.h"
#include "table/code.h"

namespace backfold::core {

// `count` elements and their codes in the planes; `high` is there for codes of 3 bits only.
void reference_pack_table(const TableCode& table, ElementType type, const void* source,
                          std::int64_t count, std::uint8_t* low, std::uint8_t* high);
void reference_unpack_table(const TableCode& table, ElementType type, const std::uint8_t* low,
                            const std::uint8_t* high, std::int64_t count, void* destination);

}  // namespace backfold::core

#endif  // BACKFOLD_TABLE_REFERENCE_H_
