// SPDX-License-Identifier: Apache-2.0

#include "group/cuda/epilogue.h"

namespace backfold::cuda {

Status unpack_group(const GroupFormat&, const Epilogue&, const void*, void*, void*) {
  return Status::error(StatusCode::kUnavailable, "epilogues run in host memory only");
}

}  // namespace backfold::cuda
