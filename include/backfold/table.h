// SPDX-License-Identifier: Apache-2.0
//
// Elements as numbers of cells in a table: 1 to 4 bits, deterministic and biased, off by default.
//
// For backward passes that read a tensor through one function only, and a coarse one: the
// derivative of an activation. The table cuts the line into 2^bits cells and gives each one value.
//
//   code(x) = number of bounds <= x,   value(code) = values[code]
//
// An element on a bound belongs to the cell above it. NaN is not at or above any bound: its code is
// 0. fp64 elements are rounded to fp32 first. A value is rounded to the type, to nearest; finite
// ones stay finite.
//
// Bytes. 1, 2 and 4 bits are one plane of that width. 3 bits are a plane of the low 2 bits and,
// after it, one of the high bit. In a plane of w bits the code of element i stands at bit w * i,
// counted from the least significant bit of the first byte. Zero bits fill each plane up to a
// multiple of 16 bytes.
//
// Bias. A cell decodes to its value, always. derivative_table() chooses values that make the error
// small for the gradient of one activation; no other reader of the tensor may be served from it.

#ifndef BACKFOLD_TABLE_H_
#define BACKFOLD_TABLE_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "backfold/execution.h"
#include "backfold/status.h"
#include "backfold/types.h"

namespace backfold {

struct TableFormat {
  ElementType type = ElementType::kF32;  // fp32, fp16, bf16 or fp64; of source and result
  int bits = 3;                          // 1 to 4
  std::array<float, 15> bounds{};        // the first 2^bits - 1: finite and rising
  std::array<float, 16> values{};        // the first 2^bits: what the codes decode to
  std::int64_t count = 0;                // elements
};

// Says what is wrong with a format: a value that is not allowed.
Status validate(const TableFormat& format);

// Bytes of the payload: a function of the format alone. 0 for a format that validate() refuses.
std::size_t packed_bytes(const TableFormat& format);

// Packs format.count contiguous elements, aligned to their size. Reads the source once and never
// writes it.
Status pack(const TableFormat& format, const void* source, Payload payload,
            const Execution& execution);

// Restores format.count elements. Every payload of the right size decodes to something.
Status unpack(const TableFormat& format, ConstPayload payload, void* destination,
              const Execution& execution);

// The table for the derivative of gelu, gelu_tanh or silu, at 2, 3 or 4 bits: cells and constants
// minimise the mean squared error of the derivative for normal inputs of variance 1, and a cell's
// value is an input inside it whose derivative is the constant. So an autograd formula that is
// handed the decoded tensor multiplies the gradient by the constant. docs/formats.md has the
// errors.
Status derivative_table(Activation activation, int bits, ElementType type, std::int64_t count,
                        TableFormat* table);

}  // namespace backfold

#endif  // BACKFOLD_TABLE_H_
