// SPDX-License-Identifier: Apache-2.0
//
// The words that every codec shares: element types, keys, and views of memory that the caller owns.

#ifndef BACKFOLD_TYPES_H_
#define BACKFOLD_TYPES_H_

#include <cstddef>
#include <cstdint>

namespace backfold {

// The values are part of no format; they only name a type between caller and core.
enum class ElementType : std::uint8_t { kF32, kF16, kBF16, kF64, kI64, kI32, kI16, kBool };

// Bytes of one element, or 0 for a value that names no type.
constexpr std::size_t size_of(ElementType type) {
  switch (type) {
    case ElementType::kF64:
    case ElementType::kI64:
      return 8;
    case ElementType::kF32:
    case ElementType::kI32:
      return 4;
    case ElementType::kF16:
    case ElementType::kBF16:
    case ElementType::kI16:
      return 2;
    case ElementType::kBool:
      return 1;
  }
  return 0;
}

// "fp32", "bf16", ...; "unknown" for a value that names no type.
const char* name_of(ElementType type);

// Elementwise functions; gelu is the one by erf, gelu_tanh its usual approximation.
enum class Activation : std::uint8_t { kNone, kGelu, kGeluTanh, kSilu, kSigmoid, kTanh, kRelu };

// What random numbers are drawn from. Two tensors need different streams under one seed; the same
// key and the same tensor give the same bytes on every backend.
struct Key {
  std::uint64_t seed = 0;
  std::uint64_t stream = 0;
  // Of work that is recorded once and run many times (a CUDA graph): a number in memory of the
  // backend that each run reads anew, so that it draws other numbers. Null is as good as a 0 there.
  const std::uint32_t* turn = nullptr;
};

// Payloads start on a multiple of this many bytes.
inline constexpr std::size_t kPayloadAlignment = 16;

// More elements than any machine holds, few enough that no size computed from them overflows.
inline constexpr std::int64_t kMaxElements = std::int64_t{1} << 48;

// Where packed bytes go. `bytes` is the room there is, at least packed_bytes() of the format.
struct Payload {
  void* data = nullptr;
  std::size_t bytes = 0;
};

// Packed bytes to read.
struct ConstPayload {
  const void* data = nullptr;
  std::size_t bytes = 0;

  ConstPayload() = default;
  ConstPayload(const void* data_in, std::size_t bytes_in) : data(data_in), bytes(bytes_in) {}
  ConstPayload(const Payload& payload) : data(payload.data), bytes(payload.bytes) {}
};

}  // namespace backfold

#endif  // BACKFOLD_TYPES_H_
