// SPDX-License-Identifier: Apache-2.0
//
// Values scaled by row: on every backend the payload is that of the scaled values, bit for bit, and
// the result is the formula applied to their decoded values.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/group_data.h"
#include "core/support.h"
#include "group/row_affine.h"

namespace backfold::testing {
namespace {

struct Rows {
  std::int64_t run, count;
  bool shifted;
};

// Rows whose magnitudes differ by twelve orders, one of them zero.
std::vector<float> scales_of(std::int64_t rows) {
  std::vector<float> scales;
  for (std::int64_t r = 0; r < rows; ++r)
    scales.push_back(
        std::ldexp(1.0f + 0.3f * static_cast<float>(r % 3), 5 * static_cast<int>(r % 9) - 20));
  return scales;
}
std::vector<float> shifts_of(std::int64_t rows) {
  std::vector<float> shifts;
  for (std::int64_t r = 0; r < rows; ++r)
    shifts.push_back(0.75f * static_cast<float>(r % 7) - 2.0f);
  return shifts;
}

void expect_scaled(GroupFormat format, const Rows& rows, std::int64_t count, std::int64_t columns,
                   Kind kind = Kind::kNormal) {
  format.count = count;
  format.columns = format.layout == Layout::kStrided ? columns : 0;
  const Elements source = make_elements(kind, format.type, count, false);
  const std::vector<float> scales = scales_of(rows.count), shifts = shifts_of(rows.count);
  const auto row = [&](std::int64_t i) {
    return static_cast<std::size_t>(i / rows.run % rows.count);
  };
  std::vector<float> values(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i)
    values[static_cast<std::size_t>(i)] = core::scaled(
        static_cast<float>(source.at(i)), rows.shifted ? shifts[row(i)] : 0.0f, scales[row(i)]);
  const Key key{.seed = 7, .stream = static_cast<std::uint64_t>(count)};
  const GroupFormat plain = core::format_of_values(format);
  const Bytes scaled(bytes_of(values).begin(), bytes_of(values).end());
  const Bytes payload = packed(plain, scaled, key, reference());
  const Bytes decoded = unpacked(plain, payload, reference());

  for (const Place& place : places()) {
    SCOPED_TRACE(describe(format) + ", runs of " + std::to_string(rows.run) + ", " +
                 std::to_string(rows.count) + " rows, on " + place.name);
    const Backend backend = place.execution.backend;
    Memory scale(backend, 4 * scales.size()), shift(backend, 4 * shifts.size());
    scale.write(bytes_of(scales));
    shift.write(bytes_of(shifts));
    const RowAffine by{rows.shifted ? static_cast<const float*>(shift.data()) : nullptr,
                       static_cast<const float*>(scale.data()), rows.run, rows.count};
    Memory from(backend, source.bytes.size()), bytes(backend, packed_bytes(format)),
        to(backend, source.bytes.size());
    from.write(source.bytes);
    ASSERT_TRUE(
        pack(format, by, from.data(), key, {bytes.data(), bytes.bytes()}, place.execution).ok());
    ASSERT_TRUE(bytes.read() == payload);
    ASSERT_TRUE(bytes.guards_intact());
    ASSERT_TRUE(unpack(format, by, {bytes.data(), bytes.bytes()}, to.data(), place.execution).ok());
    ASSERT_TRUE(to.guards_intact());
    const Elements back{format.type, to.read()};
    for (std::int64_t i = 0; i < count; ++i) {
      float y;
      std::memcpy(&y, decoded.data() + 4 * i, 4);
      const float x =
          core::restored(y, rows.shifted ? shifts[row(i)] : 0.0f, 1.0f / scales[row(i)]);
      const double number = static_cast<double>(x);
      const Elements expected = elements_of(format.type, {&number, 1});
      if (std::isnan(x)) {
        ASSERT_TRUE(std::isnan(back.at(i))) << i;
      } else {
        ASSERT_EQ(back.at(i), expected.at(0)) << i;
      }
    }
  }
}

// Runs of one element are channels last, of 128 and more rows of a layer norm; 49 are the pixels of
// a map, 3 is shorter than a vector.
constexpr Rows kRows[] = {{1, 33, true},  {3, 5, true},   {49, 7, true},
                          {96, 9, false}, {130, 4, true}, {100'000, 1, true}};
constexpr ElementType kTypes[] = {ElementType::kF32, ElementType::kF16, ElementType::kBF16};

TEST(GroupRows, PacksTheScaledValuesOnEveryBackend) {
  for (const ElementType type : kTypes)
    for (const int bits : kCodeWidths)
      for (const Rows& rows : kRows) {
        if (bits == 16 && type != ElementType::kF32) continue;
        ASSERT_NO_FATAL_FAILURE(expect_scaled({.type = type, .bits = bits}, rows, 3'000 + 77, 0));
        ASSERT_NO_FATAL_FAILURE(expect_scaled(
            {.type = type, .bits = bits, .layout = Layout::kStrided}, rows, 300 * 49, 49));
      }
}

TEST(GroupRows, LeavesSpecialElementsSpecial) {
  for (const ElementType type : kTypes)
    for (const Kind kind :
         {Kind::kConstant, Kind::kZeros, Kind::kMinusInf, Kind::kNan, Kind::kHuge})
      for (const Rows& rows : kRows)
        for (const Layout layout : {Layout::kFlat, Layout::kStrided})
          ASSERT_NO_FATAL_FAILURE(
              expect_scaled({.type = type, .bits = 4, .layout = layout}, rows, 260 * 35, 35, kind));
}

// Without scaling, a row a million times smaller than its neighbours comes back as their noise:
// errors of 1e5 times its own size. Scaled, each row has errors of its own size.
TEST(GroupRows, KeepErrorsInTheirRow) {
  constexpr std::int64_t kRun = 48, kCount = 64;
  std::vector<float> scales, x;
  for (std::int64_t r = 0; r < kCount; ++r) scales.push_back(r % 2 ? 1e6f : 1.0f);
  for (std::int64_t i = 0; i < kRun * kCount; ++i)
    x.push_back(std::sin(static_cast<float>(i)) / scales[static_cast<std::size_t>(i / kRun)]);
  const GroupFormat format{.bits = 4, .count = kRun * kCount};
  const RowAffine by{nullptr, scales.data(), kRun, kCount};
  std::vector<std::byte> payload(packed_bytes(format) + 16);
  void* aligned = payload.data();
  std::size_t room = payload.size();
  ASSERT_NE(std::align(16, packed_bytes(format), aligned, room), nullptr);
  ASSERT_TRUE(pack(format, by, x.data(), {1, 2}, {aligned, packed_bytes(format)}, {}).ok());
  std::vector<float> back(x.size());
  ASSERT_TRUE(unpack(format, by, {aligned, packed_bytes(format)}, back.data(), {}).ok());
  for (std::size_t i = 0; i < x.size(); ++i)
    ASSERT_LT(std::abs(back[i] - x[i]) * scales[i / kRun], 0.2f) << i;
}

TEST(GroupRows, RefusesWhatItIsNotFor) {
  const float one = 1;
  const RowAffine by{nullptr, &one, 4, 1};
  EXPECT_TRUE(validate(GroupFormat{}, by).ok());
  EXPECT_FALSE(validate({.type = ElementType::kF64}, by).ok());
  EXPECT_FALSE(validate({.layout = Layout::kRotated}, by).ok());
  EXPECT_FALSE(validate({.group = 256}, by).ok());
  EXPECT_FALSE(validate({.zero_exact = true}, by).ok());
  EXPECT_FALSE(validate(GroupFormat{}, {nullptr, &one, 0, 1}).ok());
  EXPECT_FALSE(validate(GroupFormat{}, {nullptr, &one, 1, 0}).ok());
  EXPECT_FALSE(validate(GroupFormat{}, {nullptr, nullptr, 1, 1}).ok());
}

}  // namespace
}  // namespace backfold::testing
