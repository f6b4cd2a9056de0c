// SPDX-License-Identifier: Apache-2.0
//
// Every backend writes the reference's bytes and reads them back to the reference's elements.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "base/caches.h"
#include "core/group_data.h"
#include "core/support.h"

namespace backfold::testing {
namespace {

// Whole payloads are compared, including padding and unused codes. A backend that fuses where the
// reference does not, rounds a conversion differently or changes the order of sums fails on the
// first hundred elements of "normal"; one that is off at a border fails at the sizes around 128.
void expect_agreement(GroupFormat format, Kind kind, std::int64_t count, std::int64_t columns,
                      std::size_t offset) {
  format.count = count;
  format.columns = format.layout == Layout::kStrided ? columns : 0;
  const Elements source = make_elements(kind, format.type, count, format.zero_exact);
  const Key key{.seed = 42, .stream = static_cast<std::uint64_t>(count)};
  const Bytes payload = packed(format, source.bytes, key, reference());
  const Bytes elements = unpacked(format, payload, reference());
  const std::size_t past = offset * size_of(format.type);
  for (const Place& place : places()) {
    SCOPED_TRACE(describe(format) + ", " + name_of(kind) + ", offset " + std::to_string(offset) +
                 ", on " + place.name);
    ASSERT_TRUE(packed(format, source.bytes, key, place, past) == payload);
    ASSERT_TRUE(unpacked(format, payload, place, past) == elements);
  }
}

// With one row every group is a single element; 3 divides none of the counts it is used with.
constexpr struct {
  std::int64_t rows, columns;
} kShapes[] = {{1, 1},    {1, 130}, {127, 3},  {128, 31}, {129, 1},
               {129, 33}, {300, 3}, {256, 64}, {300, 130}};

TEST(GroupAgreement, ForEveryFormatAndKindOfData) {
  for (const GroupFormat& format : all_formats()) {
    for (const Kind kind : kAllKinds) {
      // Whole groups, then a short last one; the strided shapes have both too, and the second one
      // has whole tiles.
      if (format.layout == Layout::kStrided) {
        ASSERT_NO_FATAL_FAILURE(expect_agreement(format, kind, 300 * 3, 3, 0));
        ASSERT_NO_FATAL_FAILURE(expect_agreement(format, kind, 131 * 37, 37, 0));
      } else {
        ASSERT_NO_FATAL_FAILURE(expect_agreement(format, kind, 768 + 77, 0, 0));
      }
    }
  }
}

TEST(GroupAgreement, ForEveryShapeOfAStridedTensor) {
  for (const GroupFormat& format : all_formats()) {
    if (format.layout != Layout::kStrided || (format.bits != 3 && format.bits != 4)) continue;
    for (const auto& shape : kShapes)
      for (const Kind kind : {Kind::kHeavyTailed, Kind::kMinusInf})
        ASSERT_NO_FATAL_FAILURE(
            expect_agreement(format, kind, shape.rows * shape.columns, shape.columns, 1));
  }
}

TEST(GroupAgreement, ForEverySizeUpTo1025) {
  const GroupFormat formats[] = {
      {.type = ElementType::kF32, .bits = 4},
      {.type = ElementType::kF32, .bits = 1, .group = 256},
      {.type = ElementType::kF16, .bits = 5, .zero_exact = true},
      {.type = ElementType::kBF16, .bits = 3, .layout = Layout::kRotated},
      {.type = ElementType::kF64, .bits = 16},
  };
  for (const GroupFormat& format : formats)
    for (std::int64_t count = 0; count <= 1025; ++count)
      ASSERT_NO_FATAL_FAILURE(expect_agreement(format, Kind::kHeavyTailed, count, 0,
                                               static_cast<std::size_t>(count % 3)));
}

TEST(GroupAgreement, ForEveryNumberOfRowsUpTo1025) {
  const GroupFormat format{.type = ElementType::kBF16, .bits = 2, .layout = Layout::kStrided};
  for (std::int64_t rows = 0; rows <= 1025; ++rows)
    ASSERT_NO_FATAL_FAILURE(expect_agreement(format, Kind::kNormal, rows * 3, 3, 0));
}

// Elements are aligned only to their own size.
TEST(GroupAgreement, ForSourcesAtAnyAlignment) {
  for (const GroupFormat& format : all_formats()) {
    if (format.bits != 2 && format.bits != 6 && format.bits != 8) continue;
    for (const std::size_t offset : {1, 2, 3, 5, 7})
      ASSERT_NO_FATAL_FAILURE(expect_agreement(format, Kind::kHeavyTailed, 519 * 5, 519, offset));
  }
}

TEST(GroupAgreement, ForAwkwardLargeSizes) {
  for (const GroupFormat& format : all_formats()) {
    if (format.bits != 4 || format.zero_exact) continue;
    for (const std::int64_t count : {4'099, 65'537, 100'003})
      ASSERT_NO_FATAL_FAILURE(expect_agreement(format, Kind::kNormal, count * 3, 3, 1));
  }
}

// Large enough that three threads have work. A split inside a group would change its range.
TEST(GroupAgreement, ForAnyNumberOfThreads) {
  for (const GroupFormat& format : all_formats()) {
    if (format.type != ElementType::kF32 || (format.bits != 1 && format.bits != 4)) continue;
    ASSERT_NO_FATAL_FAILURE(expect_agreement(format, Kind::kNormal, 1'537 * 129, 129, 0));
  }
}

// Large ones bypass the caches, in another code path.
TEST(GroupAgreement, ForDestinationsLargerThanTheCaches) {
  const std::int64_t chosen = core::streamed_bytes().exchange(1 << 20);
  for (const ElementType type : kFloatTypes) {
    const auto count = static_cast<std::int64_t>((5u << 18) / size_of(type)) + 77;
    for (const std::size_t offset : {0, 1})
      ASSERT_NO_FATAL_FAILURE(
          expect_agreement({.type = type, .bits = 3}, Kind::kNormal, count, 0, offset));
    ASSERT_NO_FATAL_FAILURE(expect_agreement({.type = type, .bits = 3, .layout = Layout::kRotated},
                                             Kind::kNormal, count, 0, 0));
    // Columns with an infinity are restored by themselves, over what the others wrote.
    for (const std::int64_t columns : {512, 520})
      ASSERT_NO_FATAL_FAILURE(
          expect_agreement({.type = type, .bits = 3, .layout = Layout::kStrided}, Kind::kMinusInf,
                           count / columns * columns, columns, 0));
    // Where zeros are exact, and where groups are one element each.
    for (const Layout layout : {Layout::kFlat, Layout::kStrided})
      for (const Kind kind : {Kind::kRelu, Kind::kConstant})
        ASSERT_NO_FATAL_FAILURE(expect_agreement(
            {.type = type, .bits = 4, .layout = layout, .zero_exact = kind == Kind::kRelu}, kind,
            count / 512 * 512, 512, 0));
  }
  core::streamed_bytes() = chosen;
}

}  // namespace
}  // namespace backfold::testing
