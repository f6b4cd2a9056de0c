// SPDX-License-Identifier: Apache-2.0

#include "backfold/table.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "core/group_data.h"
#include "core/support.h"
#include "table/derivative_tables.h"

namespace backfold::testing {
namespace {

constexpr Activation kActivations[] = {Activation::kGelu, Activation::kGeluTanh, Activation::kSilu};

TableFormat some_table(ElementType type, int bits, std::int64_t count) {
  TableFormat format = {type, bits, {}, {}, count};
  for (int i = 0; i < 16; ++i) {
    if (i < 15) format.bounds[static_cast<std::size_t>(i)] = 0.25f * static_cast<float>(i) - 1.5f;
    format.values[static_cast<std::size_t>(i)] = 1.5f * static_cast<float>(i * i) - 20.0f;
  }
  return format;
}

float number_of(double value) { return static_cast<float>(value); }

std::uint32_t plain_code(const TableFormat& format, double element) {
  std::uint32_t code = 0;
  for (int i = 0; i < (1 << format.bits) - 1; ++i)
    code += format.bounds[static_cast<std::size_t>(i)] <= number_of(element);
  return code;
}

// The payload as the header defines it, bit by bit.
Bytes plain_payload(const TableFormat& format, const Elements& source) {
  Bytes payload(packed_bytes(format), std::byte{0});
  const int low = format.bits == 3 ? 2 : format.bits;
  const std::int64_t high_at =
      static_cast<std::int64_t>((static_cast<std::size_t>(format.count * low) + 127) / 128 * 128);
  for (std::int64_t i = 0; i < format.count; ++i) {
    const std::uint32_t code = plain_code(format, source.at(i));
    for (int bit = 0; bit < format.bits; ++bit) {
      const std::int64_t at = bit < low ? low * i + bit : high_at + i;
      if ((code >> bit & 1u) != 0)
        payload[static_cast<std::size_t>(at / 8)] |= static_cast<std::byte>(1u << at % 8);
    }
  }
  return payload;
}

Bytes plain_elements(const TableFormat& format, const Elements& source) {
  std::vector<double> numbers;
  for (std::int64_t i = 0; i < format.count; ++i)
    numbers.push_back(format.values[plain_code(format, source.at(i))]);
  return elements_of(format.type, numbers).bytes;
}

TEST(Table, PacksToTheDefinedBytesAndDecodesToTheTable) {
  for (const ElementType type : kFloatTypes) {
    for (const int bits : {1, 2, 3, 4}) {
      std::vector<std::int64_t> sizes = {0, 511, 1'023, 1'024, 1'025, 8'193};
      for (std::int64_t size = 1; size <= 140; ++size) sizes.push_back(size);
      if (bits == 3) sizes.push_back(200'003);
      for (const std::int64_t size : sizes) {
        const TableFormat format = some_table(type, bits, size);
        const Elements source =
            make_elements(Kind::kHeavyTailed, type, size, false, static_cast<std::uint64_t>(size));
        const Bytes payload = plain_payload(format, source);
        const Bytes elements = plain_elements(format, source);
        const std::size_t offset = static_cast<std::size_t>(size % 3) * size_of(type);
        for (const Place& place : places()) {
          ASSERT_TRUE(packed(format, source.bytes, place, offset) == payload)
              << place.name << ", " << bits << " bits, " << size;
          ASSERT_TRUE(unpacked(format, payload, place, offset) == elements)
              << place.name << ", " << bits << " bits, " << size;
        }
      }
    }
  }
}

TEST(Table, EverySizeUpToAThousandInTwoPlanes) {
  const Elements source = make_elements(Kind::kNormal, ElementType::kBF16, 1'025, false);
  for (std::int64_t size = 0; size <= 1'025; ++size) {
    const TableFormat format = some_table(ElementType::kBF16, 3, size);
    const auto elements = std::span(source.bytes).first(static_cast<std::size_t>(size) * 2);
    const Bytes payload = plain_payload(format, source);
    for (const Place& place : places())
      ASSERT_TRUE(packed(format, elements, place) == payload) << place.name << ", " << size;
  }
}

TEST(Table, SpecialValuesHaveTheCellsTheyAreIn) {
  // At a bound, one step below it, both zeros, and what is beyond every bound.
  const double numbers[] = {
      -1.5, std::nextafter(-1.5f, -2.0f), 0.0, -0.0, -INFINITY, INFINITY, NAN, 65'504, -65'504,
      1e-7};
  const std::uint32_t codes[] = {1, 0, 7, 7, 0, 15, 0, 15, 0, 7};
  for (const ElementType type : {ElementType::kF32, ElementType::kF64}) {
    const TableFormat format = some_table(type, 4, std::size(numbers));
    const Elements source = elements_of(type, numbers);
    for (const Place& place : places()) {
      const Bytes payload = packed(format, source.bytes, place);
      for (std::size_t i = 0; i < std::size(codes); ++i)
        EXPECT_EQ(static_cast<std::uint32_t>(payload[i / 2]) >> i % 2 * 4 & 15u, codes[i])
            << place.name << ", element " << i;
    }
  }
}

TEST(Table, ValuesMayBeAnythingAndRoundToTheType) {
  for (const ElementType type : kFloatTypes) {
    TableFormat format = some_table(type, 3, 1'000);
    format.values = {-0.0f, NAN, INFINITY, -INFINITY, 3e38f, 0.1f, 1e-42f, -70'000.0f};
    const Bytes payload = noise(packed_bytes(format), 7);
    const Bytes expected = unpacked(format, payload, reference());
    for (const Place& place : places())
      EXPECT_TRUE(unpacked(format, payload, place) == expected) << place.name;
    const Elements elements = {type, expected};
    bool nan = false;
    for (std::int64_t i = 0; i < 1'000; ++i) {
      const double value = elements.at(i);
      nan = nan || std::isnan(value);
      EXPECT_TRUE(type != ElementType::kF16 || !std::isfinite(value) || value <= 65'504);
    }
    EXPECT_TRUE(nan);
  }
}

double derivative(Activation activation, double x) {
  if (activation == Activation::kSilu) {
    const double s = 1 / (1 + std::exp(-x));
    return s * (1 + x * (1 - s));
  }
  if (activation == Activation::kGelu)
    return 0.5 * std::erfc(-x / std::sqrt(2.0)) + x * std::exp(-x * x / 2) / std::sqrt(2 * M_PI);
  const double scale = std::sqrt(2 / M_PI), t = std::tanh(scale * (x + 0.044715 * x * x * x));
  return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * scale * (1 + 3 * 0.044715 * x * x);
}

// The quantiles of the normal distribution: data without noise.
std::vector<double> normal_quantiles(int count) {
  std::vector<double> numbers;
  for (int i = 0; i < count; ++i) {
    const double wanted = (i + 0.5) / count;
    double low = -8, high = 8;
    for (int step = 0; step < 50; ++step) {
      const double middle = (low + high) / 2;
      (0.5 * std::erfc(-middle / std::sqrt(2.0)) < wanted ? low : high) = middle;
    }
    numbers.push_back(low);
  }
  return numbers;
}

TEST(Table, DerivativesHaveTheStatedErrorOnNormalData) {
  const std::vector<double> numbers = normal_quantiles(20'001);
  for (const Activation activation : kActivations) {
    for (const int bits : {2, 3, 4}) {
      for (const ElementType type : kFloatTypes) {
        TableFormat format;
        ASSERT_TRUE(derivative_table(activation, bits, type, std::ssize(numbers), &format).ok());
        const Elements source = elements_of(type, numbers);
        const Elements result = {type,
                                 unpacked(format, packed(format, source.bytes, Place{}), Place{})};
        double error = 0, energy = 0;
        for (std::size_t i = 0; i < numbers.size(); ++i) {
          const double exact = derivative(activation, numbers[i]);
          const double off =
              derivative(activation, result.at(static_cast<std::int64_t>(i))) - exact;
          error += off * off, energy += exact * exact;
        }
        double stated = 0;
        for (const core::DerivativeTable& row : core::kDerivativeTables)
          if (row.activation == activation && row.bits == bits) stated = row.error;
        // A table for another activation, or cells off by one, are off by more than half.
        EXPECT_NEAR(std::sqrt(error / energy), stated, 0.0002 + 0.01 * stated)
            << static_cast<int>(activation) << ", " << bits << " bits, " << backfold::name_of(type);
      }
    }
  }
}

TEST(Table, DerivativeTablesHaveRisingCellsAroundTheirValues) {
  for (const Activation activation : kActivations) {
    for (const int bits : {2, 3, 4}) {
      TableFormat format;
      ASSERT_TRUE(derivative_table(activation, bits, ElementType::kF32, 7, &format).ok());
      EXPECT_EQ(format.bits, bits);
      EXPECT_EQ(format.count, 7);
      for (std::uint32_t code = 0; code < 1u << bits; ++code)
        EXPECT_EQ(plain_code(format, format.values[code]), code);
    }
  }
}

TEST(Table, BadInputIsRefusedByNameAndNothingIsWritten) {
  const auto invalid = StatusCode::kInvalidArgument;
  const TableFormat good = some_table(ElementType::kF32, 3, 100);
  const auto changed = [&](auto change) {
    TableFormat format = good;
    change(format);
    return format;
  };
  const std::pair<TableFormat, std::string_view> cases[] = {
      {changed([](auto& f) { f.type = ElementType::kBool; }),
       "type must be fp32, fp16, bf16 or fp64, got bool (7)"},
      {changed([](auto& f) { f.bits = 0; }), "bits must be between 1 and 4, got 0"},
      {changed([](auto& f) { f.bits = 5; }), "bits must be between 1 and 4, got 5"},
      {changed([](auto& f) { f.count = -1; }), "count must be between 0 and 2^48, got -1"},
      {changed([](auto& f) { f.bounds[2] = -1.25f; }),
       "bounds must rise, got bounds[1] = -1.25 and bounds[2] = -1.25"},
      {changed([](auto& f) { f.bounds[6] = INFINITY; }),
       "bounds must be finite, got bounds[6] = inf"},
      {changed([](auto& f) { f.bounds[0] = NAN; }), "bounds must be finite, got bounds[0]"}};
  for (const Place& place : places()) {
    const Execution& where = place.execution;
    Memory source(where.backend, 400), payload(where.backend, 48), result(where.backend, 400);
    const Bytes before = payload.read(), result_before = result.read();
    const Payload room = {payload.data(), 48};
    ASSERT_EQ(packed_bytes(good), 48u);
    for (const auto& [format, words] : cases) {
      expect_error(validate(format), invalid, words);
      expect_error(pack(format, source.data(), room, where), invalid, words);
      expect_error(unpack(format, room, result.data(), where), invalid, words);
      EXPECT_EQ(packed_bytes(format), 0u);
    }
    expect_error(pack(good, nullptr, room, where), invalid, "source must not be null");
    expect_error(pack(good, source.data(), {room.data, 47}, where), StatusCode::kShortPayload,
                 "payload must hold 48 bytes, got 47");
    expect_error(unpack(good, room, nullptr, where), invalid, "destination must not be null");
    EXPECT_EQ(payload.read(), before);
    EXPECT_EQ(result.read(), result_before);
  }
  TableFormat table = good;
  expect_error(derivative_table(Activation::kGelu, 5, ElementType::kF32, 1, &table), invalid,
               "bits must be 2, 3 or 4 for a derivative, got 5");
  expect_error(derivative_table(static_cast<Activation>(9), 3, ElementType::kF32, 1, &table),
               invalid, "activation must be gelu, gelu_tanh or silu, got 9");
  expect_error(derivative_table(Activation::kSilu, 3, ElementType::kI64, 1, &table), invalid,
               "type");
  expect_error(derivative_table(Activation::kSilu, 3, ElementType::kF32, 1, nullptr), invalid,
               "table must not be null");
  EXPECT_EQ(table.values, good.values);
}

}  // namespace
}  // namespace backfold::testing
