// SPDX-License-Identifier: Apache-2.0
//
// Test data for a group quantizer, ordinary and awkward.

#ifndef BACKFOLD_TESTS_CORE_GROUP_DATA_H_
#define BACKFOLD_TESTS_CORE_GROUP_DATA_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "backfold/group.h"

namespace backfold::testing {

// Elements of one floating-point type, as bytes.
struct Elements {
  ElementType type;
  std::vector<std::byte> bytes;

  std::int64_t count() const { return static_cast<std::int64_t>(bytes.size() / size_of(type)); }
  double at(std::int64_t index) const;  // exactly
  std::vector<double> numbers() const;
};

// Numbers as elements, rounded to nearest; finite ones stay finite.
Elements elements_of(ElementType type, std::span<const double> numbers);

enum class Kind {
  kNormal,
  kHeavyTailed,
  kRelu,
  kFarFromZero,  // -10.8 +- 0.01
  kVeryFar,      // farther than an ordinary header reaches
  kConstant,
  kZeros,
  kMixedZeros,  // -0 and +0
  kDenormals,   // of the type
  kHuge,        // the largest numbers of the type, of both signs
  kMinusInf,    // among normal ones
  kPlusInf,
  kNan,
  kMixedKinds,
  kOnlyNonFinite,
  kTwoValued,
  kOneOutlier,  // zeros except for one element
};

inline constexpr Kind kAllKinds[] = {
    Kind::kNormal,     Kind::kHeavyTailed, Kind::kRelu,          Kind::kFarFromZero,
    Kind::kVeryFar,    Kind::kConstant,    Kind::kZeros,         Kind::kMixedZeros,
    Kind::kDenormals,  Kind::kHuge,        Kind::kMinusInf,      Kind::kPlusInf,
    Kind::kNan,        Kind::kMixedKinds,  Kind::kOnlyNonFinite, Kind::kTwoValued,
    Kind::kOneOutlier,
};

const char* name_of(Kind kind);

// `count` elements of a kind, the same for the same arguments. None is negative if so requested.
Elements make_elements(Kind kind, ElementType type, std::int64_t count, bool non_negative,
                       std::uint64_t seed = 1);

inline constexpr ElementType kFloatTypes[] = {ElementType::kF32, ElementType::kF16,
                                              ElementType::kBF16, ElementType::kF64};

// Every format that validate() accepts, except for its count and columns.
std::vector<GroupFormat> all_formats();

// "fp32 4 bit strided 128 zero-exact 1003 (17 columns)".
std::string describe(const GroupFormat& format);

}  // namespace backfold::testing

#endif  // BACKFOLD_TESTS_CORE_GROUP_DATA_H_
