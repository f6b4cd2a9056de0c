// SPDX-License-Identifier: Apache-2.0
//
// Pooling as scalar loops: the definition that every other backend reproduces bit for bit.

#ifndef BACKFOLD_POOL_REFERENCE_H_
#define BACKFOLD_POOL_REFERENCE_H_

#include <cstdint>

#include "base/rng.h"
#include "pool/geometry.h"

namespace backfold::core {

// The parts of a payload.
struct PoolParts {
  std::uint16_t* averages;
  std::uint32_t* headers;  // not used without a residual, as are codes
  std::uint32_t* codes;

  PoolParts(const PoolShape& shape, void* payload)
      : averages(static_cast<std::uint16_t*>(payload)),
        headers(
            reinterpret_cast<std::uint32_t*>(static_cast<char*>(payload) + shape.header_offset())),
        codes(reinterpret_cast<std::uint32_t*>(static_cast<char*>(payload) + shape.code_offset())) {
  }
};

// Writes the averages, the header and the codes of a band.
void reference_pack_band(const PoolShape& shape, ElementType type, const void* source, MixedKey key,
                         const PoolParts& parts, std::int64_t band);

void reference_unpack_band(const PoolShape& shape, ElementType type, const PoolParts& parts,
                           void* destination, std::int64_t band);

// The band's share of expected_squared_error().
double reference_band_error(const PoolShape& shape, ElementType type, const void* source,
                            std::int64_t band);

}  // namespace backfold::core

#endif  // BACKFOLD_POOL_REFERENCE_H_
