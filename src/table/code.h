// SPDX-License-Identifier: Apache-2.0
//
// How one element becomes the number of its cell and comes back, for host code and CUDA kernels.

#ifndef BACKFOLD_TABLE_CODE_H_
#define BACKFOLD_TABLE_CODE_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/codes.h"
#include "base/convert.h"
#include "base/host_device.h"

namespace backfold::core {

inline constexpr std::array<int, 4> kTableWidths = {1, 2, 3, 4};

// A table as the kernels read it: the values are elements already, so that none of them rounds.
struct TableCode {
  int bits;
  float bounds[15];
  std::uint64_t values[16];  // bits of the elements
};

BACKFOLD_HD std::uint32_t cell_of(const TableCode& table, float value) {
  std::uint32_t code = 0;
  for (int i = 0; i < (1 << table.bits) - 1; ++i) code += value >= table.bounds[i] ? 1u : 0u;
  return code;
}

// The planes of a code: widths, and where the second one starts.
struct TablePlanes {
  constexpr TablePlanes(int bits, std::int64_t count)
      : low(bits == 3 ? 2 : bits),
        high(bits == 3 ? 1 : 0),
        high_at(plane_bytes(low, count)),
        bytes(high_at + (high != 0 ? plane_bytes(high, count) : 0)) {}

  int low;
  int high;  // 0: none
  std::size_t high_at;
  std::size_t bytes;
};

}  // namespace backfold::core

#endif  // BACKFOLD_TABLE_CODE_H_
