// SPDX-License-Identifier: Apache-2.0

#ifndef BACKFOLD_GROUP_CUDA_EPILOGUE_H_
#define BACKFOLD_GROUP_CUDA_EPILOGUE_H_

#include "backfold/epilogue.h"

namespace backfold::cuda {

// Arguments have been checked; pointers, those of the epilogue too, are to device memory.
Status unpack_group(const GroupFormat& format, const Epilogue& epilogue, const void* payload,
                    void* destination, void* stream);

}  // namespace backfold::cuda

#endif  // BACKFOLD_GROUP_CUDA_EPILOGUE_H_
