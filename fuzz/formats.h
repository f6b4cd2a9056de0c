// SPDX-License-Identifier: Apache-2.0
//
// An input's format: its first byte says whether fields take only allowed values or any, and
// whether the rows of a group quantizer are scaled; the second chooses the codec; the next ones
// fill the fields.

#ifndef BACKFOLD_FUZZ_FORMATS_H_
#define BACKFOLD_FUZZ_FORMATS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "backfold/copy.h"
#include "backfold/group.h"
#include "backfold/mask.h"
#include "backfold/narrow.h"
#include "backfold/pool.h"
#include "backfold/predicate.h"
#include "backfold/ranged.h"
#include "backfold/samples.h"
#include "backfold/table.h"
#include "input.h"

namespace backfold::fuzz {

inline constexpr ElementType kTypes[] = {ElementType::kF32, ElementType::kF16, ElementType::kBF16,
                                         ElementType::kF64, ElementType::kI64, ElementType::kI32,
                                         ElementType::kI16, ElementType::kBool};

template <typename Format>
Format read(Input& input);

template <>
inline GroupFormat read(Input& input) {
  constexpr Layout kLayouts[] = {Layout::kFlat, Layout::kStrided, Layout::kRotated};
  constexpr int kGroups[] = {128, 256};
  GroupFormat format;
  format.type = input.one_of(kTypes);
  format.bits = input.one_of(kCodeWidths);
  format.layout = input.one_of(kLayouts);
  format.group = input.one_of(kGroups);
  format.zero_exact = input.flag();
  format.count = input.count();
  format.columns = input.count();
  if (input.flag() && format.columns > 0 && format.count > 0)
    format.count -= format.count % format.columns;
  return format;
}

// The group quantizer over scaled rows, as a format of its own.
struct ScaledGroup : GroupFormat {
  std::vector<float> shift, scale;
  std::int64_t run = 0;

  RowAffine rows() const {
    return {shift.empty() ? nullptr : shift.data(), scale.data(), run,
            static_cast<std::int64_t>(scale.size())};
  }
};

inline Status validate(const ScaledGroup& format) {
  return validate(static_cast<const GroupFormat&>(format), format.rows());
}

inline std::size_t packed_bytes(const ScaledGroup& format) {
  return validate(format).ok() ? packed_bytes(static_cast<const GroupFormat&>(format)) : 0;
}

inline Status pack(const ScaledGroup& format, const void* source, const Key& key, Payload payload,
                   const Execution& execution) {
  return pack(format, format.rows(), source, key, payload, execution);
}

inline Status unpack(const ScaledGroup& format, ConstPayload payload, void* destination,
                     const Execution& execution) {
  return unpack(format, format.rows(), payload, destination, execution);
}

template <>
inline ScaledGroup read(Input& input) {
  ScaledGroup format;
  static_cast<GroupFormat&>(format) = read<GroupFormat>(input);
  format.run = input.count();
  format.scale.resize(input.any<std::uint8_t>() % 64);
  if (input.flag()) format.shift.resize(format.scale.size());
  const bool raw = input.flag();
  for (std::vector<float>* numbers : {&format.scale, &format.shift})
    for (float& number : *numbers)
      number = raw ? input.any<float>() : static_cast<float>(input.any<std::int8_t>()) / 8;
  return format;
}

template <>
inline PredicateFormat read(Input& input) {
  constexpr Comparison kComparisons[] = {
      Comparison::kNonZero,   Comparison::kGreater,    Comparison::kGreaterEqual, Comparison::kLess,
      Comparison::kLessEqual, Comparison::kInsideOpen, Comparison::kInsideClosed};
  PredicateFormat format;
  format.type = input.one_of(kTypes);
  format.count = input.count();
  format.comparison = input.one_of(kComparisons);
  format.low = input.any<double>();
  format.high = input.any<double>();
  format.nan = input.flag();
  format.if_true = input.any<double>();
  format.if_false = input.any<double>();
  return format;
}

template <>
inline MaskFormat read(Input& input) {
  MaskFormat format;
  format.type = input.one_of(kTypes);
  format.count = input.count();
  return format;
}

template <>
inline NarrowFormat read(Input& input) {
  NarrowFormat format;
  format.type = input.one_of(kTypes);
  format.count = input.count();
  format.low = input.flag() ? input.any<std::int64_t>() : input.any<std::int16_t>();
  format.high = input.flag() ? input.any<std::int64_t>() : input.any<std::int16_t>();
  format.has_sentinel = input.flag();
  format.sentinel = input.flag() ? input.any<std::int64_t>() : input.any<std::int16_t>();
  return format;
}

template <>
inline RangedFormat read(Input& input) {
  constexpr std::int64_t kSizes[] = {0, 1, 2, 3, 5, 8, 17, 64};
  RangedFormat format;
  format.type = input.one_of(kTypes);
  format.bits = input.one_of(kCodeWidths);
  format.outer = input.one_of(kSizes);
  format.channels = input.one_of(kSizes);
  format.inner = input.one_of(kSizes);
  return format;
}

template <>
inline TableFormat read(Input& input) {
  TableFormat format;
  format.type = input.one_of(kTypes);
  format.bits = input.one_of(kCodeWidths);
  format.count = input.count();
  const bool rising = input.flag();
  for (std::size_t i = 0; i < format.bounds.size(); ++i)
    format.bounds[i] = rising ? static_cast<float>(i) : input.any<float>();
  for (float& value : format.values) value = input.any<float>();
  return format;
}

template <>
inline SampleFormat read(Input& input) {
  SampleFormat format;
  format.type = input.one_of(kTypes);
  format.samples = input.flag() ? input.count() : input.any<std::uint8_t>() % 16;
  format.per_sample = input.count();
  // Unsigned: a wild input's counts may overflow.
  auto left = static_cast<std::uint64_t>(format.samples);
  for (std::int64_t& samples : format.histogram) {
    samples = input.flag() ? input.count() : input.any<std::uint8_t>() % 4;
    left -= static_cast<std::uint64_t>(samples);
  }
  if (input.flag())
    format.histogram[3] =
        static_cast<std::int64_t>(static_cast<std::uint64_t>(format.histogram[3]) + left);
  return format;
}

template <>
inline PoolFormat read(Input& input) {
  constexpr int kBlocks[] = {2, 3, 4, 7, 8, 13, 16};
  constexpr int kBits[] = {0, 1, 2, 3, 4, 8};
  PoolFormat format;
  format.type = input.one_of(kTypes);
  format.block = input.one_of(kBlocks);
  format.bits = input.one_of(kBits);
  format.outer = input.size(4);
  format.depth = input.flag() ? input.size(12) : 1;
  format.height = input.flag() ? input.size(40) : 1;
  format.width = input.size(200);
  format.inner = input.flag() ? input.size(40) : 1;
  return format;
}

template <>
inline CopyFormat read(Input& input) {
  return {input.count()};
}

template <typename Format>
std::size_t size_of_element(const Format& format) {
  if constexpr (requires { format.bytes; })
    return 1;
  else
    return size_of(format.type);
}

// Elements of a format that validate() accepts.
template <typename Format>
std::int64_t element_count(const Format& format) {
  if constexpr (requires { format.bytes; })
    return format.bytes;
  else if constexpr (requires { format.channels; })
    return format.outer * format.channels * format.inner;
  else if constexpr (requires { format.per_sample; })
    return format.samples * format.per_sample;
  else if constexpr (requires { count(format); })
    return count(format);
  else
    return format.count;
}

// Bytes of its elements, 0 for a format that validate() refuses.
template <typename Format>
std::size_t element_bytes(const Format& format) {
  if (!validate(format).ok()) return 0;
  return static_cast<std::size_t>(element_count(format)) * size_of_element(format);
}

// Reads a format and calls work(format, input) with it.
template <typename Work>
int with_format(std::span<const std::uint8_t> bytes, const Work& work) {
  Input input(bytes);
  const auto manner = input.any<std::uint8_t>();
  input.set_wild(manner % 4 == 3);
  switch (input.any<std::uint8_t>() % 9) {
    case 0:
      if ((manner & 0x40) != 0)
        work(read<ScaledGroup>(input), input);
      else
        work(read<GroupFormat>(input), input);
      break;
    case 1:
      work(read<PredicateFormat>(input), input);
      break;
    case 2:
      work(read<MaskFormat>(input), input);
      break;
    case 3:
      work(read<NarrowFormat>(input), input);
      break;
    case 4:
      work(read<RangedFormat>(input), input);
      break;
    case 5:
      work(read<TableFormat>(input), input);
      break;
    case 6:
      work(read<SampleFormat>(input), input);
      break;
    case 7:
      work(read<PoolFormat>(input), input);
      break;
    default:
      work(read<CopyFormat>(input), input);
  }
  return 0;
}

}  // namespace backfold::fuzz

#endif  // BACKFOLD_FUZZ_FORMATS_H_
