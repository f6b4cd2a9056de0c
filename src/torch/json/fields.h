// SPDX-License-Identifier: Apache-2.0
//
// Reads fields of JSON objects, with a clear error for one that is missing or of another type, and
// numbers that JSON cannot express.

#ifndef BACKFOLD_TORCH_JSON_FIELDS_H_
#define BACKFOLD_TORCH_JSON_FIELDS_H_

#include <c10/util/Exception.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace backfold::torch_layer {

using Json = nlohmann::ordered_json;  // keeps keys in the order they are written

// Raises ValueError if `text` is not a JSON object. `what` names it.
inline Json parse_object(std::string_view text, const char* what) {
  Json parsed = Json::parse(text, nullptr, false);
  TORCH_CHECK_VALUE(!parsed.is_discarded(), what, " must be valid JSON");
  TORCH_CHECK_VALUE(parsed.is_object(), what, " must be a JSON object");
  return parsed;
}

// An object to read from, and what it is part of, for messages: "state".
struct Fields {
  const Json& object;
  const char* what;

  const Json& operator[](const char* name) const {
    const auto found = object.find(name);
    TORCH_CHECK_VALUE(found != object.end(), what,
                      " must have been written by Backfold, but has no '", name, "'");
    return *found;
  }
  Fields within(const char* name) const { return {(*this)[name], what}; }

  template <typename T>
  T get(const char* name) const {
    const Json& value = (*this)[name];
    try {
      if constexpr (std::is_same_v<T, bool>) {
        TORCH_CHECK_VALUE(value.is_boolean(), what, ": ", name, " must be true or false, got ",
                          value.dump());
      } else if constexpr (std::is_integral_v<T>) {
        TORCH_CHECK_VALUE(value.is_number_integer(), what, ": ", name, " must be an integer, got ",
                          value.dump());
      }
      return value.get<T>();
    } catch (const Json::exception&) {
      TORCH_CHECK_VALUE(false, what, ": ", name, " cannot be ", value.dump());
    }
  }
};

// A number in JSON, bit for bit; infinities and NaN by name.
inline Json as_json(double value) {
  if (std::isfinite(value)) return value;
  return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
}

inline double as_number(const Json& value, const char* what) {
  if (value.is_number()) return value.get<double>();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (value == "nan") return std::numeric_limits<double>::quiet_NaN();
  TORCH_CHECK_VALUE(value == "inf" || value == "-inf", what, ": a number cannot be ", value.dump());
  return value == "inf" ? kInfinity : -kInfinity;
}

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_JSON_FIELDS_H_
