// SPDX-License-Identifier: Apache-2.0
//
// Decoding with an epilogue: a tensor that a cheap operation makes of a packed one, in one pass.
//
// Where y = silu(x) * u, or y = relu(norm(x)) with a mask of its signs, y need not be stored: the
// packet of x is decoded and the operation applied to each value on its way to memory. Element i,
// in memory order, goes through these stages, each optional, in fp32:
//
//   decode      x = the packet's value, not rounded to the packet's type; x = x * (1 / scale[r]) +
//               shift[r] for a packet made with `packed_rows`
//   rows        x = (x - shift[r]) * scale[r],   r = i / run mod rows
//   columns     x = x * weight[c] + bias[c],     c = i / run mod columns
//   steps       a short program, operation by operation: see Step
//   result      x rounded to nearest, finite numbers to finite ones (as every decode does)
//
// A packet of normalised values whose statistics `rows` would apply again is decoded as an fp32
// packet without `packed_rows` and without `rows`: it holds what they give.
//
// Rounding. Every sum and product rounds by itself, so that all backends give the same bytes where
// no activation but relu is applied; the other activations are within
//
//   2e-6 * |f(x)| + 1e-7
//
// of the exact value on every backend, and differ between backends within that. A program of
// numbers around one of them may be evaluated as one formula, which rounds less often. NaN stays
// NaN except under a 0 of a mask.

#ifndef BACKFOLD_EPILOGUE_H_
#define BACKFOLD_EPILOGUE_H_

#include <cstdint>
#include <span>

#include "backfold/execution.h"
#include "backfold/group.h"
#include "backfold/status.h"
#include "backfold/types.h"

namespace backfold {

struct ColumnAffine {
  const float* weight = nullptr;  // of each column, memory of the backend
  const float* bias = nullptr;    // null: 0
  std::int64_t run = 0;           // consecutive elements of one column
  std::int64_t columns = 0;       // after which they begin again
};

// Programs have at most so many steps, and values can be kept in so many slots.
inline constexpr int kMaxSteps = 16;
inline constexpr int kSlots = 2;

// One operation on a value x. Its operand is `factor` times 1, times element i / run mod entries of
// a tensor, or times a slot.
struct Step {
  enum class Kind : std::uint8_t {
    kAdd,       // x = x + operand
    kMultiply,  // x = x * operand
    kSquare,    // x = x * x
    kCube,      // x = x * x * x
    kActivate,  // x = f(x)
    kMask,      // x = bit[i] ? x * factor : 0
    kKeep,      // slot = x
    kTake,      // x = slot
  };
  enum class From : std::uint8_t { kNumber, kTensor, kSlot };

  Kind kind = Kind::kAdd;
  From from = From::kNumber;
  Activation activation = Activation::kNone;  // of kActivate
  int slot = 0;                               // of kKeep, kTake and From::kSlot; filled before
  float factor = 1.0f;
  const void* tensor = nullptr;
  ElementType type = ElementType::kF32;  // of the tensor: fp32, fp16 or bf16
  std::int64_t run = 1;                  // consecutive elements that share one of the tensor's
  std::int64_t entries = 0;              // of the tensor, after which they begin again
  ConstPayload mask = {};                // one bit per element, as in predicate.h
};

// A stage is left out where its first pointer is null. All memory but that of the steps themselves
// is of the backend, and the destination overlaps none of it.
struct Epilogue {
  RowAffine packed_rows = {};  // what the packet was made with
  RowAffine rows = {};
  ColumnAffine columns = {};
  std::span<const Step> steps = {};
  ElementType result_type = ElementType::kF32;  // fp32, fp16 or bf16, whatever the packet's
};

// Formats are fp32, fp16 or bf16 in flat or strided groups of 128; zero_exact ones without
// packed_rows. Says what is wrong with a format, a stage, or the two together.
Status validate(const GroupFormat& format, const Epilogue& epilogue);

// Writes format.count elements of epilogue.result_type.
Status unpack(const GroupFormat& format, const Epilogue& epilogue, ConstPayload payload,
              void* destination, const Execution& execution);

}  // namespace backfold

#endif  // BACKFOLD_EPILOGUE_H_
