// SPDX-License-Identifier: Apache-2.0
//
// SIMD kernels that decode with an epilogue.

#ifndef BACKFOLD_GROUP_SIMD_EPILOGUE_H_
#define BACKFOLD_GROUP_SIMD_EPILOGUE_H_

#include <cstdint>

#include "backfold/epilogue.h"

namespace backfold::cpu {

struct EpilogueKernels {
  std::int64_t target;  // Highway's bit of the one they were compiled for
  // Restores groups [begin, end) of a tensor. Arguments have been checked.
  void (*unpack)(const GroupFormat& format, const Epilogue& epilogue, const void* payload,
                 void* destination, std::int64_t begin, std::int64_t end);
};

// The kernels of a SIMD target, by Highway's bit.
EpilogueKernels epilogue_kernels(std::int64_t target_bit);

}  // namespace backfold::cpu

#endif  // BACKFOLD_GROUP_SIMD_EPILOGUE_H_
