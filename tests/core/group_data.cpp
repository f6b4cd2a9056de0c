// SPDX-License-Identifier: Apache-2.0

#include "core/group_data.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <sstream>

#include "base/convert.h"

namespace backfold::testing {
namespace {

// Calls work with a null pointer of the type.
template <typename Work>
auto for_type(ElementType type, Work work) {
  switch (type) {
    case ElementType::kF16:
      return work(static_cast<core::Half*>(nullptr));
    case ElementType::kBF16:
      return work(static_cast<core::BFloat*>(nullptr));
    case ElementType::kF64:
      return work(static_cast<double*>(nullptr));
    default:
      return work(static_cast<float*>(nullptr));
  }
}

double smallest_denormal(ElementType type) {
  switch (type) {
    case ElementType::kF16:
      return 0x1p-24;
    case ElementType::kBF16:
      return 0x1p-133;
    case ElementType::kF64:
      return 0x1p-1074;
    default:
      return 0x1p-149;
  }
}

double largest(ElementType type) {
  switch (type) {
    case ElementType::kF16:
      return 65504;
    case ElementType::kBF16:
      return 0x1.fep127;
    case ElementType::kF64:
      return 1.7e308;
    default:
      return std::numeric_limits<float>::max();
  }
}

class Generator {
 public:
  Generator(Kind kind, ElementType type, std::uint64_t seed)
      : kind_(kind), type_(type), random_(seed) {}

  double next(std::int64_t i) {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    const double normal = normal_(random_);
    const double uniform = uniform_(random_);
    switch (kind_) {
      case Kind::kNormal:
        return normal;
      case Kind::kHeavyTailed:
        return normal * std::exp(1.5 * normal_(random_));
      case Kind::kRelu:
        return std::max(normal, 0.0);
      case Kind::kFarFromZero:
        return -10.8 + 0.01 * (2 * uniform - 1);
      case Kind::kVeryFar:
        return 3000.0 + uniform;
      case Kind::kConstant:
        return 0.1;
      case Kind::kZeros:
        return 0.0;
      case Kind::kMixedZeros:
        return uniform < 0.5 ? -0.0 : 0.0;
      case Kind::kDenormals:
        return std::floor(normal * 20) * smallest_denormal(type_);
      case Kind::kHuge:
        return (2 * uniform - 1) * largest(type_);
      case Kind::kMinusInf:
        return uniform < 0.2 ? -kInfinity : normal;
      case Kind::kPlusInf:
        return uniform < 0.02 ? kInfinity : normal;
      case Kind::kNan:
        return uniform < 0.1 ? std::nan("") : normal;
      case Kind::kMixedKinds:
        return uniform < 0.01 ? std::nan("") : uniform < 0.02 ? kInfinity : normal;
      case Kind::kOnlyNonFinite:
        return i < 200 ? -kInfinity : uniform < 0.5 ? kInfinity : std::nan("");
      case Kind::kTwoValued:
        return uniform < 0.9 ? 1.109375 : 0.0;
      case Kind::kOneOutlier:
        return i % 100 == 50 ? 3.0 + normal : 0.0;
    }
    return 0.0;
  }

 private:
  Kind kind_;
  ElementType type_;
  std::mt19937_64 random_;
  std::normal_distribution<double> normal_;
  std::uniform_real_distribution<double> uniform_;
};

}  // namespace

double Elements::at(std::int64_t index) const {
  return for_type(type, [&]<typename T>(T*) {
    T element;
    std::memcpy(&element, bytes.data() + static_cast<std::size_t>(index) * sizeof(T), sizeof(T));
    return core::to_double(element);
  });
}

std::vector<double> Elements::numbers() const {
  std::vector<double> all(static_cast<std::size_t>(count()));
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = at(static_cast<std::int64_t>(i));
  return all;
}

Elements elements_of(ElementType type, std::span<const double> numbers) {
  Elements elements{type, std::vector<std::byte>(numbers.size() * size_of(type))};
  for_type(type, [&]<typename T>(T*) {
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      const T element = core::from_double<T>(numbers[i]);
      std::memcpy(elements.bytes.data() + i * sizeof(T), &element, sizeof(T));
    }
  });
  return elements;
}

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::kNormal:
      return "normal";
    case Kind::kHeavyTailed:
      return "heavy tailed";
    case Kind::kRelu:
      return "relu";
    case Kind::kFarFromZero:
      return "far from zero";
    case Kind::kVeryFar:
      return "very far";
    case Kind::kConstant:
      return "constant";
    case Kind::kZeros:
      return "zeros";
    case Kind::kMixedZeros:
      return "mixed zeros";
    case Kind::kDenormals:
      return "denormals";
    case Kind::kHuge:
      return "huge";
    case Kind::kMinusInf:
      return "minus inf";
    case Kind::kPlusInf:
      return "plus inf";
    case Kind::kNan:
      return "nan";
    case Kind::kMixedKinds:
      return "mixed kinds";
    case Kind::kOnlyNonFinite:
      return "only non-finite";
    case Kind::kTwoValued:
      return "two-valued";
    case Kind::kOneOutlier:
      return "one outlier";
  }
  return "unknown";
}

Elements make_elements(Kind kind, ElementType type, std::int64_t count, bool non_negative,
                       std::uint64_t seed) {
  Generator generator(kind, type, seed);
  std::vector<double> numbers(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const double number = generator.next(static_cast<std::int64_t>(i));
    numbers[i] = non_negative && number < 0 ? -number : number;  // -0 is not negative
  }
  return elements_of(type, numbers);
}

std::vector<GroupFormat> all_formats() {
  std::vector<GroupFormat> formats;
  for (const ElementType type : kFloatTypes)
    for (const int bits : kCodeWidths)
      for (const Layout layout : {Layout::kFlat, Layout::kStrided, Layout::kRotated})
        for (const int group : {128, 256})
          for (const bool zero_exact : {false, true}) {
            const GroupFormat format{.type = type,
                                     .bits = bits,
                                     .layout = layout,
                                     .group = group,
                                     .zero_exact = zero_exact};
            if (validate(format).ok()) formats.push_back(format);
          }
  return formats;
}

std::string describe(const GroupFormat& format) {
  std::ostringstream text;
  text << name_of(format.type) << ' ' << format.bits << " bit "
       << (format.layout == Layout::kFlat      ? "flat "
           : format.layout == Layout::kStrided ? "strided "
                                               : "rotated ")
       << format.group << (format.zero_exact ? " zero-exact " : " ") << format.count;
  if (format.layout == Layout::kStrided) text << " (" << format.columns << " columns)";
  return text.str();
}

}  // namespace backfold::testing
