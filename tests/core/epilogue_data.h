// SPDX-License-Identifier: Apache-2.0
//
// Packets with epilogues to test, and what the stages should make of them.

#ifndef BACKFOLD_TESTS_CORE_EPILOGUE_DATA_H_
#define BACKFOLD_TESTS_CORE_EPILOGUE_DATA_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "backfold/epilogue.h"
#include "core/group_data.h"
#include "core/support.h"

namespace backfold::testing {

struct Runs {
  std::int64_t run, entries;
};

// Which stages there are. A run of 1 is the last axis of a tensor, 49 the pixels of a map, 3 is
// shorter than a vector.
struct Stages {
  std::optional<Runs> packed_rows = {}, rows = {}, columns = {};
  bool bias = true;
  Activation activation = Activation::kNone;
  std::optional<ElementType> product = {};
  bool mask = false;
  ElementType result = ElementType::kF32;
};

// A payload and everything that the stages read, on the host.
struct Given {
  GroupFormat format;
  Stages stages;
  float mask_factor = 1.25f;
  Bytes payload;
  std::vector<float> decoded;  // as an fp32 packet
  std::vector<float> packed_shift, packed_scale, mean, scale, weight, bias;
  Elements product{ElementType::kF32, {}};
  std::vector<std::byte> keep;  // bool
  Bytes mask;

  Given(const GroupFormat& format, const Stages& stages, std::int64_t count, std::int64_t columns,
        Kind kind = Kind::kNormal);

  // Packs other values.
  void pack_values(const std::vector<float>& values);

  // Input of the activation of element i, rounded as the stages before it say.
  float before_activation(std::int64_t i) const;

  float product_at(std::int64_t i) const;  // 1 without that stage
  bool keeps(std::int64_t i) const;        // true without that stage
};

// An entry of a table at element i.
float entry(const std::vector<float>& table, const Runs& runs, std::int64_t i);

const char* name_of(Activation activation);

// The activation in double precision.
double exact(Activation activation, double x);

// Whether backends agree on an activation to the last bit.
bool is_exact(Activation activation);

// The stated error of an activation's value.
double allowed(Activation activation, double value);

// What unpack() makes of it on a backend, `offset` elements past an aligned place, with more steps
// after those of the stages.
Elements finished(const Given& given, const Place& place, std::size_t offset = 0,
                  std::span<const Step> more = {});

}  // namespace backfold::testing

#endif  // BACKFOLD_TESTS_CORE_EPILOGUE_DATA_H_
