// SPDX-License-Identifier: Apache-2.0
//
// Widths: the bits that a code of the group quantizer may have. Samples are packed at the same
// ones.

#ifndef BACKFOLD_WIDTHS_H_
#define BACKFOLD_WIDTHS_H_

#include <array>

namespace backfold {

inline constexpr std::array<int, 8> kCodeWidths = {1, 2, 3, 4, 5, 6, 8, 16};

constexpr bool is_code_width(int bits) {
  for (const int width : kCodeWidths)
    if (bits == width) return true;
  return false;
}

// "1, 2, 3, 4, 5, 6, 8, 16", for messages.
const char* list_code_widths();

}  // namespace backfold

#endif  // BACKFOLD_WIDTHS_H_
