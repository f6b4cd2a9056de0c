// SPDX-License-Identifier: Apache-2.0
//
// How long bytes take to leave a device and come back.

#ifndef BACKFOLD_TORCH_OFFLOAD_LINK_H_
#define BACKFOLD_TORCH_OFFLOAD_LINK_H_

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

namespace backfold::torch_layer {

struct Link {
  std::string where;       // "a file in /tmp"
  double ms_per_byte = 0;  // there and back
};

// Of what offloading from that device uses, measured once in a process, by the first who asks. None
// where nothing can be sent.
std::optional<Link> link_of(const at::Device& device);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_OFFLOAD_LINK_H_
