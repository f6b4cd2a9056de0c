// SPDX-License-Identifier: Apache-2.0
//
// Shares that add up to 1 again, on every backend, wherever rows begin.

#include "backfold/shares.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/convert.h"
#include "core/support.h"

namespace backfold::testing {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();
const ElementType kTypes[] = {ElementType::kF32, ElementType::kF16, ElementType::kBF16};

Bytes bytes_of(ElementType type, const std::vector<float>& values) {
  Bytes bytes(values.size() * size_of(type));
  core::with_element(type, [&]<typename T>() {
    for (std::size_t i = 0; i < values.size(); ++i) {
      const T element = core::from_float<T>(values[i]);
      std::memcpy(bytes.data() + i * sizeof(T), &element, sizeof(T));
    }
  });
  return bytes;
}

std::vector<float> values_of(ElementType type, const Bytes& bytes) {
  std::vector<float> values(bytes.size() / size_of(type));
  core::with_element(type, [&]<typename T>() {
    for (std::size_t i = 0; i < values.size(); ++i) {
      T element;
      std::memcpy(&element, bytes.data() + i * sizeof(T), sizeof(T));
      values[i] = core::to_float(element);
    }
  });
  return values;
}

// Rows of a place, `offset` elements past a multiple of 64 bytes.
std::vector<float> restored(ElementType type, std::int64_t rows, std::int64_t length,
                            const std::vector<float>& values, const Place& place,
                            std::size_t offset = 0) {
  Memory memory(place.execution.backend, values.size() * size_of(type), offset * size_of(type));
  memory.write(bytes_of(type, values));
  const Status status = restore_sums(type, rows, length, memory.data(), place.execution);
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_TRUE(memory.guards_intact()) << "written out of bounds";
  return values_of(type, memory.read());
}

// Logarithms whose shares add up to anything between a half and two.
std::vector<float> noisy(std::int64_t rows, std::int64_t length) {
  std::vector<float> values;
  for (std::int64_t row = 0; row < rows; ++row)
    for (std::int64_t i = 0; i < length; ++i) {
      const auto place = static_cast<float>(row * length + i);
      values.push_back(-std::log(static_cast<float>(length)) +
                       0.7f * std::sin(1.7f * place + static_cast<float>(row)));
    }
  return values;
}

TEST(ShareSums, AreOneInEveryRowWhereverItBegins) {
  for (const ElementType type : kTypes)
    for (const std::int64_t length : {1, 2, 7, 31, 32, 33, 129, 1'023, 1'025, 5'003}) {
      const std::int64_t rows = 5;
      const std::vector<float> values = values_of(type, bytes_of(type, noisy(rows, length)));
      const double unit = type == ElementType::kF32   ? 1e-5
                          : type == ElementType::kF16 ? 4e-3
                                                      : 4e-2;
      for (const Place& place : places()) {
        const auto found =
            restored(type, rows, length, values, place, static_cast<std::size_t>(length % 5));
        for (std::int64_t row = 0; row < rows; ++row) {
          double before = 0, sum = 0;
          for (std::int64_t i = 0; i < length; ++i) {
            before += std::exp(values[static_cast<std::size_t>(row * length + i)]);
            sum += std::exp(found[static_cast<std::size_t>(row * length + i)]);
          }
          EXPECT_NEAR(sum, 1, unit) << place.name << ", " << name_of(type) << ", row " << row
                                    << " of " << length << ", " << before << " before";
          for (std::int64_t i = 0; i < length; ++i) {
            const auto at = static_cast<std::size_t>(row * length + i);
            ASSERT_NEAR(found[at], values[at] - std::log(before), unit * 4) << place.name;
          }
        }
      }
    }
}

TEST(ShareSums, LeaveRowsAloneThatAddUpToNoNumber) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float many = std::numeric_limits<float>::infinity();
  const std::vector<float> values = {-1, nan, -2, many, -1, -1, kNever, kNever, kNever, -1, -1, -1};
  for (const ElementType type : {ElementType::kF32, ElementType::kBF16})
    for (const Place& place : places()) {
      const auto found = restored(type, 4, 3, values, place);
      EXPECT_EQ(found[0], -1) << place.name;
      EXPECT_TRUE(std::isnan(found[1]));
      EXPECT_EQ(found[4], -1);
      EXPECT_EQ(found[6], kNever);
      EXPECT_NEAR(found[9], -std::log(3.0), 1e-2);
    }
}

TEST(ShareSums, KeepWhatIsImpossible) {
  for (const ElementType type : kTypes)
    for (const std::int64_t length : {3, 16, 2'000}) {
      std::vector<float> values(static_cast<std::size_t>(length), kNever);
      values[0] = -1;
      for (const Place& place : places()) {
        auto expected = values;
        expected[0] = 0;
        EXPECT_EQ(restored(type, 1, length, values, place), expected) << place.name;
      }
    }
}

TEST(ShareSums, OfNothingAreNothing) {
  for (const Place& place : places()) {
    EXPECT_TRUE(restored(ElementType::kF32, 0, 7, {}, place).empty());
    EXPECT_TRUE(restored(ElementType::kF32, 7, 0, {}, place).empty());
  }
}

TEST(ShareSums, RefuseWhatTheyCannotAddUp) {
  float number = 0;
  const auto refused = [&](ElementType type, std::int64_t rows, std::int64_t length, void* memory) {
    return restore_sums(type, rows, length, memory, reference().execution);
  };
  EXPECT_EQ(refused(ElementType::kF64, 1, 1, &number).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(refused(ElementType::kI32, 1, 1, &number).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(refused(ElementType::kF32, -1, 1, &number).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(refused(ElementType::kF32, 1, -1, &number).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(refused(ElementType::kF32, kMaxElements, 2, &number).code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(refused(ElementType::kF32, 1, 1, nullptr).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(number, 0);
}

}  // namespace
}  // namespace backfold::testing
