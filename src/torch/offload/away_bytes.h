// SPDX-License-Identifier: Apache-2.0
//
// Bytes of a place that leave their device in a step.

#ifndef BACKFOLD_TORCH_OFFLOAD_AWAY_BYTES_H_
#define BACKFOLD_TORCH_OFFLOAD_AWAY_BYTES_H_

#include <atomic>
#include <cstdint>

namespace backfold::torch_layer {

struct AwayBytes {
  std::atomic<std::int64_t> sent = 0;  // their copies have begun, and have not failed
  std::atomic<std::int64_t> left = 0;  // and ended
};

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_OFFLOAD_AWAY_BYTES_H_
