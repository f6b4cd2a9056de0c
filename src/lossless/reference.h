// SPDX-License-Identifier: Apache-2.0
//
// The lossless codecs in plain scalar loops: the definition that every other backend is held to.
//
// Each call works on `count` elements, the first of which is a multiple of kBitBlock of the
// tensor's; bits are written up to a whole block, the missing ones as 0.

#ifndef BACKFOLD_LOSSLESS_REFERENCE_H_
#define BACKFOLD_LOSSLESS_REFERENCE_H_

#include <cstddef>
#include <cstdint>

#include "backfold/predicate.h"
#include "base/bits.h"
#include "lossless/narrow_code.h"

namespace backfold::core {

void reference_pack_predicate(const PredicateFormat& format, const void* source, std::int64_t count,
                              std::uint8_t* bits);

void reference_pack_mask(std::size_t element_bytes, const void* source, std::int64_t count,
                         std::uint8_t* bits);

// Serves predicates and masks: both become one of two elements.
void reference_unpack_bits(const BitValues& values, std::size_t element_bytes,
                           const std::uint8_t* bits, std::int64_t count, void* destination);

void reference_encode(const NarrowCode& code, std::size_t element_bytes, const void* source,
                      std::int64_t count, void* codes);

void reference_decode(const NarrowCode& code, std::size_t element_bytes, const void* codes,
                      std::int64_t count, void* destination);

}  // namespace backfold::core

#endif  // BACKFOLD_LOSSLESS_REFERENCE_H_
