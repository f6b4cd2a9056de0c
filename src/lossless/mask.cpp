// SPDX-License-Identifier: Apache-2.0
//
// The mask codec's door: checks, sizes, the choice of a backend, and the look at a mask's value.

#include "backfold/mask.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>

#include "base/bits.h"
#include "base/blocks.h"
#include "base/checks.h"
#include "base/convert.h"
#include "base/dispatch.h"
#include "lossless/cuda/bits.h"
#include "lossless/reference.h"
#include "lossless/simd/bits.h"

namespace backfold {
namespace {

// The prefix that holds the value: one unit of payload alignment.
constexpr std::size_t kPrefix = kPayloadAlignment;

std::size_t total_bytes(const MaskFormat& format) {
  return kPrefix + core::bit_bytes(format.count);
}

// The bits of the mask's value, and the first element that is neither +0 nor that; -1 if none is.
struct MaskValue {
  std::uint64_t bits = 0;
  std::int64_t odd_one = -1;
};

template <typename U>
MaskValue look(const U* elements, std::int64_t count) {
  constexpr std::int64_t kFirst = 32;     // where most tensors show that they are no mask
  constexpr std::int64_t kChunk = 4'096;  // whole chunks without an exit vectorise
  constexpr U kNegativeZero = static_cast<U>(U{1} << (8 * sizeof(U) - 1));
  MaskValue found;
  std::int64_t i = 0;
  while (i < count && elements[i] == 0) ++i;
  if (i == count) return found;
  const U value = elements[i];
  const auto odd = [value](U element) { return element != 0 && element != value; };
  if (value == kNegativeZero) return {0, i};
  found.bits = value;
  for (const std::int64_t end = std::min(count, i + kFirst); i < end; ++i)
    if (odd(elements[i])) return {value, i};
  for (; i < count; i += kChunk) {
    const U* end = elements + std::min(count, i + kChunk);
    bool any = false;
    for (const U* element = elements + i; element < end; ++element) any |= odd(*element);
    if (any) {
      found.odd_one = std::find_if(elements + i, end, odd) - elements;
      break;
    }
  }
  return found;
}

MaskValue look(const MaskFormat& format, const void* source) {
  switch (size_of(format.type)) {
    case 2:
      return look(static_cast<const std::uint16_t*>(source), format.count);
    case 4:
      return look(static_cast<const std::uint32_t*>(source), format.count);
    default:
      return look(static_cast<const std::uint64_t*>(source), format.count);
  }
}

double number_of(ElementType type, std::uint64_t bits) {
  switch (type) {
    case ElementType::kF16:
      return static_cast<double>(core::half_to_float(static_cast<std::uint16_t>(bits)));
    case ElementType::kBF16:
      return static_cast<double>(core::bfloat_to_float(static_cast<std::uint16_t>(bits)));
    case ElementType::kF32:
      return static_cast<double>(core::float_of(static_cast<std::uint32_t>(bits)));
    default:
      return core::double_of(bits);
  }
}

Status check_contract(const MaskFormat& format, const void* source, const Execution& execution) {
  if (!core::kCheckContracts || format.count == 0) return {};
  std::int64_t odd_one = -1;
  if (execution.backend == Backend::kCuda) {
    BACKFOLD_RETURN_IF_ERROR(
        cuda::find_odd_one(size_of(format.type), source, format.count, execution.stream, &odd_one));
  } else {
    odd_one = look(format, source).odd_one;
  }
  if (odd_one < 0) return {};
  return Status::error(StatusCode::kContractBroken,
                       "source must hold nothing but +0 and one other value, but element %" PRId64
                       " is -0 or a third one",
                       odd_one);
}

// Copies the first element whose bit is set into the prefix. Looks at the bits, not at the source:
// in most masks at their first word.
void write_prefix(std::size_t size, const void* source, std::size_t bytes, std::uint8_t* payload) {
  std::memset(payload, 0, kPrefix);
  const std::uint8_t* bits = payload + kPrefix;
  const std::uint8_t* byte = std::find_if(bits, bits + bytes, [](auto b) { return b != 0; });
  if (byte == bits + bytes) return;
  std::size_t element = static_cast<std::size_t>(byte - bits) * 8;
  for (; (*byte >> element % 8 & 1) == 0; ++element) {
  }
  std::memcpy(payload, static_cast<const char*>(source) + element * size, size);
}

}  // namespace

Status validate(const MaskFormat& format) {
  BACKFOLD_RETURN_IF_ERROR(core::check_float_type(format.type));
  return core::check_count(format.count);
}

std::size_t packed_bytes(const MaskFormat& format) {
  return validate(format).ok() ? total_bytes(format) : 0;
}

Status find_mask_value(const MaskFormat& format, const void* source, bool* two_valued,
                       double* value) {
  BACKFOLD_RETURN_IF_ERROR(validate(format));
  BACKFOLD_RETURN_IF_ERROR(
      core::check_buffer("source", source, format.count, size_of(format.type)));
  if (two_valued == nullptr || value == nullptr)
    return Status::error(StatusCode::kInvalidArgument, "%s must not be null",
                         two_valued == nullptr ? "two_valued" : "value");
  const MaskValue found = look(format, source);
  *two_valued = found.odd_one < 0;
  *value = *two_valued ? number_of(format.type, found.bits) : 0.0;
  return {};
}

Status pack(const MaskFormat& format, const void* source, Payload payload,
            const Execution& execution) {
  const std::size_t size = size_of(format.type);
  BACKFOLD_RETURN_IF_ERROR(validate(format));
  BACKFOLD_RETURN_IF_ERROR(core::check_call(execution, "source", source, format.count, size,
                                            payload, total_bytes(format)));
  BACKFOLD_RETURN_IF_ERROR(check_contract(format, source, execution));
  std::uint8_t* const prefix = static_cast<std::uint8_t*>(payload.data);
  std::uint8_t* const bits = prefix + kPrefix;

  if (core::choose_cuda(execution))
    return cuda::pack_bits(core::any_bit_set(), size, source, format.count, bits, prefix,
                           execution.stream);
  const auto kernels = core::choose_kernels(execution, cpu::bit_kernels);
  core::split_elements(format.count, execution, [&](std::int64_t first, std::int64_t count) {
    const void* from = static_cast<const char*>(source) + static_cast<std::size_t>(first) * size;
    if (kernels)
      kernels->pack(core::any_bit_set(), size, from, count, bits + first / 8);
    else
      core::reference_pack_mask(size, from, count, bits + first / 8);
  });
  write_prefix(size, source, core::bit_bytes(format.count), prefix);
  return {};
}

Status unpack(const MaskFormat& format, ConstPayload payload, void* destination,
              const Execution& execution) {
  const std::size_t size = size_of(format.type);
  BACKFOLD_RETURN_IF_ERROR(validate(format));
  BACKFOLD_RETURN_IF_ERROR(core::check_call(execution, "destination", destination, format.count,
                                            size, payload, total_bytes(format)));
  const std::uint8_t* const prefix = static_cast<const std::uint8_t*>(payload.data);
  const std::uint8_t* const bits = prefix + kPrefix;
  core::BitValues values = {0, 0};

  if (core::choose_cuda(execution))
    return cuda::unpack_bits(values, size, bits, format.count, destination, prefix,
                             execution.stream);
  std::memcpy(&values.if_true, prefix, size);
  const auto kernels = core::choose_kernels(execution, cpu::bit_kernels);
  core::split_elements(format.count, execution, [&](std::int64_t first, std::int64_t count) {
    void* to = static_cast<char*>(destination) + static_cast<std::size_t>(first) * size;
    if (kernels)
      kernels->unpack(values, size, bits + first / 8, count, to);
    else
      core::reference_unpack_bits(values, size, bits + first / 8, count, to);
  });
  return {};
}

}  // namespace backfold
