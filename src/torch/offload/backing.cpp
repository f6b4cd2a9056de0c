// SPDX-License-Identifier: Apache-2.0

#include "torch/offload/backing.h"

#include "torch/offload/file_backing.h"
#include "torch/offload/pinned_backing.h"

namespace backfold::torch_layer {

std::unique_ptr<Backing> backing_for(const at::Device& device) {
  if (device.is_cpu()) return std::make_unique<FileBacking>();
  if (device.is_cuda()) return std::make_unique<PinnedBacking>(device);
  return nullptr;
}

}  // namespace backfold::torch_layer
