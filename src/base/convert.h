// SPDX-License-Identifier: Apache-2.0
//
// Elements of every floating-point type, as the fp32 numbers that the arithmetic works on, and
// back.

#ifndef BACKFOLD_BASE_CONVERT_H_
#define BACKFOLD_BASE_CONVERT_H_

#include <cfloat>
#include <cstdint>

#include "backfold/types.h"
#include "base/host_device.h"

namespace backfold::core {

// The 16-bit types in memory. Wrapped, so that templates tell them apart.
struct Half {
  std::uint16_t bits;
};
struct BFloat {
  std::uint16_t bits;
};

// Calls work.operator()<T>() with the element of a floating-point type; fp32 stands for all others.
template <typename Work>
auto with_element(ElementType type, Work work) {
  switch (type) {
    case ElementType::kF16:
      return work.template operator()<Half>();
    case ElementType::kBF16:
      return work.template operator()<BFloat>();
    case ElementType::kF64:
      return work.template operator()<double>();
    default:
      return work.template operator()<float>();
  }
}

BACKFOLD_HD bool is_finite(float value) { return (bits_of(value) & 0x7f80'0000u) != 0x7f80'0000u; }

BACKFOLD_HD float bfloat_to_float(std::uint16_t bits) {
  return float_of(static_cast<std::uint32_t>(bits) << 16);
}

// To nearest, ties to even. NaN stays NaN.
BACKFOLD_HD std::uint16_t float_to_bfloat(float value) {
  const std::uint32_t bits = bits_of(value);
  if ((bits & 0x7fff'ffffu) > 0x7f80'0000u) return static_cast<std::uint16_t>(bits >> 16 | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

BACKFOLD_HD float half_to_float(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return float_of(sign | 0x7f80'0000u | (magnitude & 0x3ffu) << 13);
  // Subnormal numbers count in 2^-24. As a product of normal ones, so that they survive on machines
  // set to take subnormal operands for zero.
  if (magnitude < 0x0400u)
    return float_of(sign | bits_of(static_cast<float>(magnitude) * 0x1p-24f));
  return float_of(sign | ((magnitude << 13) + (112u << 23)));
}

// To nearest, ties to even. NaN stays NaN, what is too large becomes infinite.
BACKFOLD_HD std::uint16_t float_to_half(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint16_t sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7fff'ffffu;
  if (magnitude > 0x7f80'0000u)
    return static_cast<std::uint16_t>(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu));
  if (magnitude >= 0x4780'0000u) return sign | 0x7c00u;  // 65,536 and more
  if (magnitude < 0x3880'0000u) {
    // Below 2^-14 the result counts in 2^-24: adding 1/2 leaves that count in the low bits.
    return static_cast<std::uint16_t>(sign | (bits_of(float_of(magnitude) + 0.5f) - 0x3f00'0000u));
  }
  return static_cast<std::uint16_t>(
      sign | ((magnitude - 0x3800'0000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13));
}

BACKFOLD_HD float to_float(float value) { return value; }
BACKFOLD_HD float to_float(Half value) { return half_to_float(value.bits); }
BACKFOLD_HD float to_float(BFloat value) { return bfloat_to_float(value.bits); }
// What is finite stays finite.
BACKFOLD_HD float to_float(double value) {
  if (value > FLT_MAX && value <= DBL_MAX) return FLT_MAX;
  if (value < -FLT_MAX && value >= -DBL_MAX) return -FLT_MAX;
  return static_cast<float>(value);
}

// Whether an element is above or below zero in its own type: an fp64 element may be, and round to 0
// in fp32.
template <typename T>
BACKFOLD_HD bool is_positive(T value) {
  return to_float(value) > 0.0f;
}
template <>
BACKFOLD_HD bool is_positive(double value) {
  return value > 0.0;
}

template <typename T>
BACKFOLD_HD bool is_negative(T value) {
  return to_float(value) < 0.0f;
}
template <>
BACKFOLD_HD bool is_negative(double value) {
  return value < 0.0;
}

// The fp32 result of a decode as an element: to nearest, and finite where it was finite.
template <typename T>
BACKFOLD_HD T from_float(float value);
template <>
BACKFOLD_HD float from_float(float value) {
  return value;
}
template <>
BACKFOLD_HD double from_float(float value) {
  return static_cast<double>(value);
}
template <>
BACKFOLD_HD BFloat from_float(float value) {
  const std::uint16_t bits = float_to_bfloat(value);
  return {static_cast<std::uint16_t>(is_finite(value) && (bits & 0x7fffu) == 0x7f80u ? bits - 1
                                                                                     : bits)};
}
template <>
BACKFOLD_HD Half from_float(float value) {
  const std::uint16_t bits = float_to_half(value);
  return {static_cast<std::uint16_t>(is_finite(value) && (bits & 0x7fffu) == 0x7c00u ? bits - 1
                                                                                     : bits)};
}

// The one NaN that decodes give: conversions of NaN keep its payload on some machines only.
BACKFOLD_HD double quiet_nan() { return double_of(0x7ff8'0000'0000'0000u); }
template <typename T>
BACKFOLD_HD T nan_element() {
  return from_float<T>(float_of(0x7fc0'0000u));
}
template <>
BACKFOLD_HD double nan_element() {
  return quiet_nan();
}

// An element as fp64, exactly, and back: how a constant group keeps its value.
template <typename T>
BACKFOLD_HD double to_double(T value) {
  const float number = to_float(value);
  return number != number ? quiet_nan() : static_cast<double>(number);
}
template <>
BACKFOLD_HD double to_double(double value) {
  return value != value ? quiet_nan() : value;
}
template <typename T>
BACKFOLD_HD T from_double(double value) {
  return value != value ? nan_element<T>() : from_float<T>(static_cast<float>(value));
}
template <>
BACKFOLD_HD double from_double(double value) {
  return value != value ? quiet_nan() : value;
}

// The least positive number that a zero-exact element of the type may become. Normal where fp32 is,
// so that it survives arithmetic that flushes subnormal numbers.
template <typename T>
BACKFOLD_HD float smallest_positive() {
  return 0x1p-126f;
}
template <>
BACKFOLD_HD float smallest_positive<Half>() {
  return 0x1p-24f;
}

}  // namespace backfold::core

#endif  // BACKFOLD_BASE_CONVERT_H_
