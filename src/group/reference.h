// SPDX-License-Identifier: Apache-2.0
//
// The group quantizer, one group at a time, in plain scalar loops: the definition that every other
// backend is held to. SIMD kernels also call it for groups off their fast path.

#ifndef BACKFOLD_GROUP_REFERENCE_H_
#define BACKFOLD_GROUP_REFERENCE_H_

#include <cstdint>

#include "backfold/group.h"
#include "base/rng.h"

namespace backfold::core {

// `first` points at element `offset` of the tensor, the others follow at `stride`. Writes the
// group's header and all of its code bytes.
void reference_pack_group(const GroupFormat& format, const void* first, std::int64_t stride,
                          int count, MixedKey key, std::uint64_t group, std::uint32_t* header,
                          std::uint8_t* codes);

void reference_unpack_group(const GroupFormat& format, std::uint32_t header,
                            const std::uint8_t* codes, void* first, std::int64_t stride, int count);

// The same for a tensor whose values are scaled by row. `element` is the number of the first.
void reference_pack_group(const GroupFormat& format, const RowAffine& rows, const void* first,
                          std::int64_t element, std::int64_t stride, int count, MixedKey key,
                          std::uint64_t group, std::uint32_t* header, std::uint8_t* codes);
void reference_unpack_group(const GroupFormat& format, const RowAffine& rows, std::uint32_t header,
                            const std::uint8_t* codes, void* first, std::int64_t element,
                            std::int64_t stride, int count);

// The group's share of expected_squared_error().
double reference_group_error(const GroupFormat& format, const void* first, std::int64_t stride,
                             int count);

}  // namespace backfold::core

#endif  // BACKFOLD_GROUP_REFERENCE_H_
