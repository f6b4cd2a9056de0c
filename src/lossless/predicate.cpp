// SPDX-License-Identifier: Apache-2.0
//
// The predicate codec's door: checks, sizes, the choice of a backend, and how a comparison becomes
// a test on keys.

#include "backfold/predicate.h"

#include <cmath>
#include <limits>

#include "base/bits.h"
#include "base/blocks.h"
#include "base/checks.h"
#include "base/convert.h"
#include "base/dispatch.h"
#include "lossless/cuda/bits.h"
#include "lossless/reference.h"
#include "lossless/simd/bits.h"

namespace backfold {
namespace {

using core::BitTest;
using core::BitValues;
using core::KeyRange;

bool reads_high(Comparison comparison) {
  return comparison == Comparison::kInsideOpen || comparison == Comparison::kInsideClosed;
}

Status check_type(ElementType type) {
  switch (type) {
    case ElementType::kF32:
    case ElementType::kF16:
    case ElementType::kBF16:
    case ElementType::kF64:
    case ElementType::kBool:
      return {};
    default:
      return Status::error(StatusCode::kInvalidArgument,
                           "type must be fp32, fp16, bf16, fp64 or bool, got %s (%d)",
                           name_of(type), static_cast<int>(type));
  }
}

std::int64_t key_of(std::uint16_t bits) { return static_cast<std::int16_t>(core::order_key(bits)); }
std::int64_t key_of(float number) {
  return static_cast<std::int32_t>(core::order_key(core::bits_of(number)));
}
std::int64_t key_of(double number) {
  return static_cast<std::int64_t>(core::order_key(core::bits_of(number)));
}

// Keys of numbers in an element type. The lowest key at or above a bound gives all other borders,
// because key(-x) = -1 - key(x).
class NumberLine {
 public:
  explicit NumberLine(ElementType type) : type_(type) {}

  std::int64_t at_least(double bound) const {
    if (type_ == ElementType::kF64) return lower_zero(key_of(bound));
    const float rounded = static_cast<float>(bound);
    if (type_ == ElementType::kF32) return lower_zero(key_of(rounded));
    const bool half = type_ == ElementType::kF16;
    const std::uint16_t near = half ? core::float_to_half(rounded) : core::float_to_bfloat(rounded);
    const float number = half ? core::half_to_float(near) : core::bfloat_to_float(near);
    // Keys compare like the numbers, and subnormal ones too under a flush mode.
    return key_of(number) < key_of(rounded) ? key_of(near) + 1 : lower_zero(key_of(near));
  }
  std::int64_t at_most(double bound) const { return -1 - at_least(-bound); }
  std::int64_t above(double bound) const { return at_most(bound) + 1; }
  std::int64_t below(double bound) const { return at_least(bound) - 1; }

  // Everything but NaN.
  KeyRange all() const { return {at_least(-kInfinity), at_most(kInfinity)}; }
  KeyRange zeros() const { return {kNegativeZero, kNegativeZero + 1}; }

 private:
  static constexpr std::int64_t kNegativeZero = -1;
  static std::int64_t lower_zero(std::int64_t key) { return key == 0 ? kNegativeZero : key; }

  static constexpr double kInfinity = std::numeric_limits<double>::infinity();
  ElementType type_;
};

// The numbers for which a comparison other than kNonZero holds.
KeyRange holding(const PredicateFormat& format, const NumberLine& line) {
  switch (format.comparison) {
    case Comparison::kGreater:
      return {line.above(format.low), line.all().high};
    case Comparison::kGreaterEqual:
      return {line.at_least(format.low), line.all().high};
    case Comparison::kLess:
      return {line.all().low, line.below(format.low)};
    case Comparison::kLessEqual:
      return {line.all().low, line.at_most(format.low)};
    case Comparison::kInsideOpen:
      return {line.above(format.low), line.below(format.high)};
    default:
      return {line.at_least(format.low), line.at_most(format.high)};
  }
}

BitTest bit_test(const PredicateFormat& format) {
  constexpr KeyRange kNone = {0, -1};
  if (format.type == ElementType::kBool) return core::any_bit_set();
  const NumberLine line(format.type);
  if (format.comparison == Comparison::kNonZero)
    return format.nan ? core::make_bit_test(line.zeros(), kNone, true)
                      : core::make_bit_test(line.all(), line.zeros(), false);
  const KeyRange range = holding(format, line);
  if (!format.nan) return core::make_bit_test(range, kNone, false);
  // With NaN, test for the numbers left out: a single range for one-sided comparisons.
  const KeyRange all = line.all();
  if (range.low == all.low) return core::make_bit_test({range.high + 1, all.high}, kNone, true);
  if (range.high == all.high) return core::make_bit_test({all.low, range.low - 1}, kNone, true);
  return core::make_bit_test(all, range, true);
}

std::uint64_t element_bits(ElementType type, double value) {
  switch (type) {
    case ElementType::kF64:
      return core::bits_of(value);
    case ElementType::kF16:
      return core::float_to_half(static_cast<float>(value));
    case ElementType::kBF16:
      return core::float_to_bfloat(static_cast<float>(value));
    default:
      return core::bits_of(static_cast<float>(value));
  }
}

BitValues bit_values(const PredicateFormat& format) {
  if (format.type == ElementType::kBool) return {1, 0};
  return {element_bits(format.type, format.if_true), element_bits(format.type, format.if_false)};
}

}  // namespace

Status validate(const PredicateFormat& format) {
  const auto error = StatusCode::kInvalidArgument;
  BACKFOLD_RETURN_IF_ERROR(check_type(format.type));
  if (format.comparison > Comparison::kInsideClosed)
    return Status::error(error, "comparison must be one of the seven of Comparison, got %d",
                         static_cast<int>(format.comparison));
  if (format.type == ElementType::kBool && format.comparison != Comparison::kNonZero)
    return Status::error(error, "comparison must be kNonZero (0) for bool, got %d",
                         static_cast<int>(format.comparison));
  if (format.comparison != Comparison::kNonZero && std::isnan(format.low))
    return Status::error(error, "low must be a number, got NaN");
  if (reads_high(format.comparison) && std::isnan(format.high))
    return Status::error(error, "high must be a number, got NaN");
  return core::check_count(format.count);
}

std::size_t packed_bytes(const PredicateFormat& format) {
  return validate(format).ok() ? core::bit_bytes(format.count) : 0;
}

Status pack(const PredicateFormat& format, const void* source, Payload payload,
            const Execution& execution) {
  const std::size_t size = size_of(format.type);
  BACKFOLD_RETURN_IF_ERROR(validate(format));
  BACKFOLD_RETURN_IF_ERROR(core::check_call(execution, "source", source, format.count, size,
                                            payload, core::bit_bytes(format.count)));
  const BitTest test = bit_test(format);

  if (core::choose_cuda(execution))
    return cuda::pack_bits(test, size, source, format.count, payload.data, nullptr,
                           execution.stream);
  const auto kernels = core::choose_kernels(execution, cpu::bit_kernels);
  core::split_elements(format.count, execution, [&](std::int64_t first, std::int64_t count) {
    const void* from = static_cast<const char*>(source) + static_cast<std::size_t>(first) * size;
    std::uint8_t* to = static_cast<std::uint8_t*>(payload.data) + first / 8;
    if (kernels)
      kernels->pack(test, size, from, count, to);
    else
      core::reference_pack_predicate(format, from, count, to);
  });
  return {};
}

Status unpack(const PredicateFormat& format, ConstPayload payload, void* destination,
              const Execution& execution) {
  const std::size_t size = size_of(format.type);
  BACKFOLD_RETURN_IF_ERROR(validate(format));
  BACKFOLD_RETURN_IF_ERROR(core::check_call(execution, "destination", destination, format.count,
                                            size, payload, core::bit_bytes(format.count)));
  const BitValues values = bit_values(format);

  if (core::choose_cuda(execution))
    return cuda::unpack_bits(values, size, payload.data, format.count, destination, nullptr,
                             execution.stream);
  const auto kernels = core::choose_kernels(execution, cpu::bit_kernels);
  core::split_elements(format.count, execution, [&](std::int64_t first, std::int64_t count) {
    const std::uint8_t* from = static_cast<const std::uint8_t*>(payload.data) + first / 8;
    void* to = static_cast<char*>(destination) + static_cast<std::size_t>(first) * size;
    if (kernels)
      kernels->unpack(values, size, from, count, to);
    else
      core::reference_unpack_bits(values, size, from, count, to);
  });
  return {};
}

}  // namespace backfold
