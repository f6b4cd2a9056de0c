// SPDX-License-Identifier: Apache-2.0
//
// CUDA kernels of the group quantizer. Arguments have been checked; pointers are to device memory.

#ifndef BACKFOLD_GROUP_CUDA_GROUP_H_
#define BACKFOLD_GROUP_CUDA_GROUP_H_

#include "backfold/group.h"
#include "base/rng.h"

namespace backfold::cuda {

// `rows`, where given, is how values are scaled; its tables are device memory, too.
Status pack_group(const GroupFormat& format, const void* source, core::MixedKey key, void* payload,
                  void* stream, const RowAffine* rows = nullptr);
Status unpack_group(const GroupFormat& format, const void* payload, void* destination, void* stream,
                    const RowAffine* rows = nullptr);

// The first negative element of a source, -1 if there is none. Waits for the stream: debug builds
// only.
Status find_negative(const GroupFormat& format, const void* source, void* stream,
                     std::int64_t* index);

}  // namespace backfold::cuda

#endif  // BACKFOLD_GROUP_CUDA_GROUP_H_
