// SPDX-License-Identifier: Apache-2.0
//
// The bytes are what group.h says: a decoder written from its first comment alone, sharing nothing
// with the library, reads every packet as the library does.

#include <gtest/gtest.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "core/group_data.h"
#include "core/support.h"

namespace backfold::testing {
namespace {

class StrangersDecoder {
 public:
  StrangersDecoder(const GroupFormat& format, const Bytes& payload)
      : format_(format), payload_(payload), elements_(static_cast<std::size_t>(format.count)) {
    const std::int64_t rows =
        format.layout == Layout::kStrided ? format.count / format.columns : format.count;
    const std::int64_t columns = format.layout == Layout::kStrided ? format.columns : 1;
    const std::int64_t along = (rows + format.group - 1) / format.group;
    groups_ = along * columns;
    for (std::int64_t group = 0; group < groups_; ++group) {
      const std::vector<double> values = decode(group);
      for (int i = 0; i < format.group; ++i) {
        const std::int64_t row = group / columns * format.group + i;
        if (row < rows)
          elements_[static_cast<std::size_t>(row * columns + group % columns)] =
              values[static_cast<std::size_t>(i)];
      }
    }
  }

  // fp64 elements of constant groups exactly, all others as fp32 numbers.
  const std::vector<double>& elements() const { return elements_; }

 private:
  std::uint64_t bits_at(std::size_t byte, std::size_t bit, int width) const {
    std::uint64_t value = 0;
    for (int i = 0; i < width; ++i) {
      const std::size_t at = bit + static_cast<std::size_t>(i);
      value |= static_cast<std::uint64_t>(
                   std::to_integer<unsigned>(payload_[byte + at / 8]) >> at % 8 & 1u)
               << i;
    }
    return value;
  }

  std::int64_t code(std::size_t codes, int i) const {
    const auto group = static_cast<std::size_t>(format_.group);
    const int low = format_.bits == 3                        ? 2
                    : format_.bits == 5 || format_.bits == 6 ? 4
                                                             : format_.bits;
    const int high = format_.bits - low;
    const auto position =
        static_cast<std::size_t>(4 * (i % (format_.group / 4)) + i / (format_.group / 4));
    std::uint64_t found = bits_at(codes, position * static_cast<std::size_t>(low), low);
    if (high != 0)
      found |= bits_at(codes + group * static_cast<std::size_t>(low) / 8,
                       position * static_cast<std::size_t>(high), high)
               << low;
    return static_cast<std::int64_t>(found);
  }

  std::vector<double> decode(std::int64_t group) const {
    const auto number = static_cast<std::size_t>(group);
    const std::size_t all_headers = (static_cast<std::size_t>(groups_) * 4 + 15) / 16 * 16;
    const std::size_t codes =
        all_headers + number * static_cast<std::size_t>(format_.group * format_.bits / 8);
    const std::uint64_t header = bits_at(number * 4, 0, 32);
    const bool far_or_special = header >> 31 != 0;
    const bool exponent_255 = (header >> 23 & 0xff) == 0xff;

    std::vector<double> values(static_cast<std::size_t>(format_.group));
    if (!far_or_special && exponent_255 && (header >> 18 & 1) == 0) {
      const std::uint64_t bits = bits_at(codes, 0, 64);
      double constant;
      std::memcpy(&constant, &bits, sizeof(constant));
      std::fill(values.begin(), values.end(), constant);
      return values;
    }

    const std::uint64_t kind = exponent_255     ? header >> (far_or_special ? 21 : 16) & 3
                               : far_or_special ? header & 3
                                                : 0;
    std::int64_t steps = (std::int64_t{1} << format_.bits) - 1;
    if (kind != 0) --steps;
    if (format_.zero_exact) --steps;
    const double step = number_of(header >> 16 & 0x7fff, 16);
    const int exponent = exponent_255 ? 0 : std::ilogb(static_cast<double>(steps) * step);
    const double m =
        far_or_special ? std::floor(signed_of(header & 0xffff) / 4) : signed_of(header & 0xffff);
    const double unit = std::ldexp(1.0, exponent - (!far_or_special ? 7 : kind == 0 ? 2 : 5));

    const auto value = [&](std::int64_t c) {
      const double share = static_cast<double>(c) / static_cast<double>(steps);
      if (far_or_special && exponent_255) return number_of(header & 0x1f'ffff, 11);
      if (exponent_255)
        return double{static_cast<float>((format_.zero_exact ? share : share * 2 - 1) * FLT_MAX)};
      return double{static_cast<float>(m * unit + static_cast<double>(c) * step)};
    };
    for (int i = 0; i < format_.group; ++i) {
      double& element = values[static_cast<std::size_t>(i)];
      const std::int64_t c = code(codes, i);
      if (kind != 0 && c == (std::int64_t{1} << format_.bits) - 1) {
        constexpr double kInfinity = std::numeric_limits<double>::infinity();
        element = kind == 1 ? kInfinity : kind == 2 ? -kInfinity : std::nan("");
      } else if (!format_.zero_exact) {
        element = value(c);
      } else {
        const double smallest = format_.type == ElementType::kF16 ? 0x1p-24 : 0x1p-126;
        element = c == 0 ? 0.0 : std::max(value(c - 1), smallest);
      }
    }
    if (format_.layout == Layout::kRotated && !far_or_special && !exponent_255) rotate_back(values);
    return values;
  }

  // D H values / 128, every sum rounded to fp32.
  static void rotate_back(std::vector<double>& values) {
    constexpr std::uint32_t kSigns[] = {0x9d3f81c6, 0x2e5bd497, 0x71a83fe2, 0xc40db65b};
    for (std::size_t stride = 1; stride <= 64; stride *= 2) {
      for (std::size_t i = 0; i < 128; ++i) {
        if ((i / stride) % 2 != 0) continue;
        const double a = values[i], b = values[i + stride];
        values[i] = static_cast<float>(a + b);
        values[i + stride] = static_cast<float>(a - b);
      }
    }
    for (std::size_t i = 0; i < 128; ++i)
      values[i] *= (kSigns[i / 32] >> (i % 32 / 2 + i % 2 * 16) & 1u) != 0 ? -1.0 / 128 : 1.0 / 128;
  }

  // The fp32 number whose upper bits these are.
  static double number_of(std::uint64_t upper, int missing) {
    const auto bits = static_cast<std::uint32_t>(upper << missing);
    float number;
    std::memcpy(&number, &bits, sizeof(number));
    return number;
  }
  static double signed_of(std::uint64_t low_half) {
    return static_cast<double>(low_half) - (low_half >= 0x8000 ? 65'536.0 : 0.0);
  }

  GroupFormat format_;
  const Bytes& payload_;
  std::int64_t groups_ = 0;
  std::vector<double> elements_;
};

TEST(GroupBytes, AreThoseOfTheHeaderFile) {
  for (GroupFormat format : all_formats()) {
    format.count = 3 * 301;
    format.columns = format.layout == Layout::kStrided ? 3 : 0;
    for (const Kind kind : kAllKinds) {
      const Elements source = make_elements(kind, format.type, format.count, format.zero_exact);
      const Bytes payload = packed(format, source.bytes, Key{4, 4}, reference());
      const Elements result{format.type, unpacked(format, payload, reference())};
      // Rounded to nearest, finite where it was finite.
      const Elements expected =
          elements_of(format.type, StrangersDecoder(format, payload).elements());
      ASSERT_TRUE(result.bytes == expected.bytes) << describe(format) << ", " << name_of(kind);
    }
  }
}

// Half a step above a code, an element takes the uppermost of its random bits as its code: at one
// bit the codes are those that docs/formats.md lists for this key, copied here.
TEST(GroupBytes, AreDrawnByTheNumbersOfTheDocumentation) {
  const unsigned codes[16] = {0xc2, 0x4a, 0x9f, 0xbf, 0xcd, 0xd9, 0x8e, 0x37,
                              0xd8, 0xb1, 0xb7, 0x65, 0xed, 0x7b, 0xd2, 0xab};
  std::vector<float> source(128, 0.5f);
  source.front() = 0.0f;
  source.back() = 1.0f;
  const GroupFormat format{.bits = 1, .count = 128};
  for (const Place& place : places()) {
    const Bytes found = packed(format, bytes_of(source), Key{.seed = 1, .stream = 2}, place);
    for (std::size_t i = 0; i < 16; ++i)
      EXPECT_EQ(std::to_integer<unsigned>(found.at(16 + i)), codes[i]) << place.name << ", " << i;
  }
}

TEST(GroupBytes, ArePaddedWithZeros) {
  const GroupFormat format{.bits = 3, .count = 128 + 1};
  const Elements source = make_elements(Kind::kNormal, format.type, format.count, false);
  const Bytes payload = packed(format, source.bytes, Key{}, reference());
  ASSERT_EQ(payload.size(), 16u + 2 * 48);
  const auto zero = [](std::byte byte) { return byte == std::byte{0}; };
  EXPECT_TRUE(std::all_of(payload.begin() + 8, payload.begin() + 16, zero));  // after two headers
  // A single element is a constant: its 8 bytes, then nothing.
  EXPECT_TRUE(std::all_of(payload.begin() + 16 + 48 + 8, payload.end(), zero));
}

TEST(GroupBytes, AreCountedFromTheFormatAlone) {
  const struct {
    GroupFormat format;
    std::size_t bytes;
  } table[] = {
      {{.bits = 4, .count = 1}, 16 + 64},
      {{.bits = 4, .count = 128}, 16 + 64},
      {{.bits = 4, .count = 129}, 16 + 2 * 64},
      {{.bits = 1, .count = 128 * 5}, 32 + 5 * 16},
      {{.bits = 3, .group = 256, .count = 257}, 16 + 2 * 96},
      {{.bits = 2, .layout = Layout::kStrided, .count = 129 * 7, .columns = 7}, 64 + 14 * 32},
      {{.bits = 16, .layout = Layout::kRotated, .count = 200}, 16 + 2 * 256},
      {{.type = ElementType::kBF16, .bits = 8, .count = std::int64_t{1} << 40},
       (std::size_t{1} << 35) + (std::size_t{1} << 40)},
  };
  for (const auto& row : table)
    EXPECT_EQ(packed_bytes(row.format), row.bytes) << describe(row.format);
}

}  // namespace
}  // namespace backfold::testing
