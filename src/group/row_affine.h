// SPDX-License-Identifier: Apache-2.0
//
// The arithmetic of RowAffine (group.h), once for host and device. Two roundings each way: no
// operation is fused.

#ifndef BACKFOLD_GROUP_ROW_AFFINE_H_
#define BACKFOLD_GROUP_ROW_AFFINE_H_

#include <cstdint>

#include "backfold/group.h"
#include "base/host_device.h"

namespace backfold::core {

// Machines differ in which NaN an operation gives: this one, always.
inline constexpr std::uint32_t kNanBits = 0x7fc0'0000u;
BACKFOLD_HD float one_nan(float value) { return value == value ? value : float_of(kNanBits); }

BACKFOLD_HD float scaled(float x, float shift, float scale) { return one_nan((x - shift) * scale); }
BACKFOLD_HD float restored(float y, float shift, float inverse) {
  return one_nan(y * inverse + shift);
}

// Where an element lies: its row, and its place in the run that it shares with its neighbours.
struct RowPlace {
  std::int64_t row, place;
};
inline RowPlace row_place(const RowAffine& rows, std::int64_t element) {
  return {element / rows.run % rows.rows, element % rows.run};
}

inline float shift_of(const RowAffine& rows, std::int64_t row) {
  return rows.shift == nullptr ? 0.0f : rows.shift[row];
}

// Formats that a row-affine tensor's values are packed with: fp32, whatever the tensor is.
inline GroupFormat format_of_values(GroupFormat format) {
  format.type = ElementType::kF32;
  return format;
}

}  // namespace backfold::core

#endif  // BACKFOLD_GROUP_ROW_AFFINE_H_
