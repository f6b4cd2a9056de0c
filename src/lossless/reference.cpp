// SPDX-License-Identifier: Apache-2.0

#include "lossless/reference.h"

#include <cstring>

#include "base/convert.h"

namespace backfold::core {
namespace {

template <typename T>
T load(const void* data, std::int64_t index) {
  T value;
  std::memcpy(&value, static_cast<const char*>(data) + index * std::int64_t{sizeof(T)}, sizeof(T));
  return value;
}

template <typename T>
void store(void* data, std::int64_t index, T value) {
  std::memcpy(static_cast<char*>(data) + index * std::int64_t{sizeof(T)}, &value, sizeof(T));
}

template <typename Answer>
void pack_answers(std::int64_t count, std::uint8_t* bits, const Answer& answer) {
  std::memset(bits, 0, bit_bytes(count));
  for (std::int64_t i = 0; i < count; ++i)
    if (answer(i)) bits[i / 8] = static_cast<std::uint8_t>(bits[i / 8] | 1u << i % 8);
}

// Orders like the number, -0 and +0 alike. Floating-point comparisons would do, but for subnormal
// numbers under a flush mode.
std::int64_t order(double number) {
  const auto key = static_cast<std::int64_t>(order_key(bits_of(number)));
  return key < 0 ? key + 1 : key;
}
std::int64_t order(float number) {
  const auto key = static_cast<std::int32_t>(order_key(bits_of(number)));
  return key < 0 ? key + 1 : key;
}

template <typename Number>
bool holds(const PredicateFormat& format, Number element) {
  if (std::isnan(element)) return format.nan;
  const std::int64_t x = order(element);
  const std::int64_t low = order(static_cast<Number>(format.low));
  const std::int64_t high = order(static_cast<Number>(format.high));
  switch (format.comparison) {
    case Comparison::kNonZero:
      return x != 0;
    case Comparison::kGreater:
      return x > low;
    case Comparison::kGreaterEqual:
      return x >= low;
    case Comparison::kLess:
      return x < low;
    case Comparison::kLessEqual:
      return x <= low;
    case Comparison::kInsideOpen:
      return low < x && x < high;
    case Comparison::kInsideClosed:
      return low <= x && x <= high;
  }
  return false;
}

template <typename T>
void unpack_as(const BitValues& values, const std::uint8_t* bits, std::int64_t count,
               void* destination) {
  for (std::int64_t i = 0; i < count; ++i) {
    const bool bit = (bits[i / 8] >> i % 8 & 1) != 0;
    store(destination, i, static_cast<T>(bit ? values.if_true : values.if_false));
  }
}

}  // namespace

void reference_pack_predicate(const PredicateFormat& format, const void* source, std::int64_t count,
                              std::uint8_t* bits) {
  pack_answers(count, bits, [&](std::int64_t i) {
    switch (format.type) {
      case ElementType::kF32:
        return holds(format, load<float>(source, i));
      case ElementType::kF16:
        return holds(format, half_to_float(load<std::uint16_t>(source, i)));
      case ElementType::kBF16:
        return holds(format, bfloat_to_float(load<std::uint16_t>(source, i)));
      case ElementType::kF64:
        return holds(format, load<double>(source, i));
      default:
        return load<std::uint8_t>(source, i) != 0;
    }
  });
}

void reference_pack_mask(std::size_t element_bytes, const void* source, std::int64_t count,
                         std::uint8_t* bits) {
  pack_answers(count, bits, [&](std::int64_t i) {
    switch (element_bytes) {
      case 2:
        return load<std::uint16_t>(source, i) != 0;
      case 4:
        return load<std::uint32_t>(source, i) != 0;
      default:
        return load<std::uint64_t>(source, i) != 0;
    }
  });
}

void reference_unpack_bits(const BitValues& values, std::size_t element_bytes,
                           const std::uint8_t* bits, std::int64_t count, void* destination) {
  switch (element_bytes) {
    case 1:
      return unpack_as<std::uint8_t>(values, bits, count, destination);
    case 2:
      return unpack_as<std::uint16_t>(values, bits, count, destination);
    case 4:
      return unpack_as<std::uint32_t>(values, bits, count, destination);
    default:
      return unpack_as<std::uint64_t>(values, bits, count, destination);
  }
}

void reference_encode(const NarrowCode& code, std::size_t element_bytes, const void* source,
                      std::int64_t count, void* codes) {
  with_narrow_types(element_bytes, code.code_bytes, [&]<typename Element, typename Code>() {
    for (std::int64_t i = 0; i < count; ++i)
      store(codes, i, encode<Code>(code, load<Element>(source, i)));
  });
}

void reference_decode(const NarrowCode& code, std::size_t element_bytes, const void* codes,
                      std::int64_t count, void* destination) {
  with_narrow_types(element_bytes, code.code_bytes, [&]<typename Element, typename Code>() {
    for (std::int64_t i = 0; i < count; ++i)
      store(destination, i, decode<Element>(code, load<Code>(codes, i)));
  });
}

}  // namespace backfold::core
