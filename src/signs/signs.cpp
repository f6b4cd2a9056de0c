// SPDX-License-Identifier: Apache-2.0
//
// The door of random signs, and the loop that writes them in host memory.

#include "backfold/signs.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/blocks.h"
#include "base/checks.h"
#include "base/convert.h"
#include "base/dispatch.h"
#include "base/rng.h"
#include "signs/cuda/signs.h"

namespace backfold {
namespace {

using core::kSignBlock;
using core::MixedKey;

// The bits of `size` in a type.
std::uint64_t bits_in(ElementType type, float size) {
  std::uint64_t bits = 0;
  core::with_element(type, [&]<typename T>() {
    const T element = core::from_float<T>(size);
    std::memcpy(&bits, &element, sizeof(T));
  });
  return bits;
}

// Writes elements `first`, a multiple of kSignBlock, to first + count.
template <typename U>
void write_signs(U number, MixedKey key, std::int64_t first, std::int64_t count,
                 void* destination) {
  U* const elements = static_cast<U*>(destination);
  const std::int64_t end = first + count;
  for (std::int64_t start = first; start < end; start += kSignBlock) {
    std::uint64_t signs =
        core::sign_word(key, static_cast<std::uint64_t>(start) / std::uint64_t{kSignBlock});
    const std::int64_t stop = std::min(end, start + kSignBlock);
    for (std::int64_t i = start; i < stop; ++i, signs >>= 1)
      elements[i] = core::with_sign(number, signs);
  }
}

}  // namespace

Status fill_signs(ElementType type, float size, std::int64_t count, const Key& key,
                  void* destination, const Execution& execution) {
  BACKFOLD_RETURN_IF_ERROR(core::check_float_type(type));
  if (!std::isfinite(size))
    return Status::error(StatusCode::kInvalidArgument, "size must be finite, got %g", size);
  BACKFOLD_RETURN_IF_ERROR(core::check_count(count));
  BACKFOLD_RETURN_IF_ERROR(core::check_execution(execution));
  BACKFOLD_RETURN_IF_ERROR(core::check_buffer("destination", destination, count, size_of(type)));
  const std::uint64_t bits = bits_in(type, size);
  const MixedKey mixed = core::mixed_for(key, execution);

  if (core::choose_cuda(execution))
    return cuda::fill_signs(bits, size_of(type), count, mixed, destination, execution.stream);
  core::report_target(execution, 0);
  core::split_elements(count, execution, [&](std::int64_t first, std::int64_t part) {
    switch (size_of(type)) {
      case 2:
        return write_signs(static_cast<std::uint16_t>(bits), mixed, first, part, destination);
      case 4:
        return write_signs(static_cast<std::uint32_t>(bits), mixed, first, part, destination);
      default:
        return write_signs(bits, mixed, first, part, destination);
    }
  });
  return {};
}

}  // namespace backfold
