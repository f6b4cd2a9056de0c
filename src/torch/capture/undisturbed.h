// SPDX-License-Identifier: Apache-2.0

#ifndef BACKFOLD_TORCH_CAPTURE_UNDISTURBED_H_
#define BACKFOLD_TORCH_CAPTURE_UNDISTURBED_H_

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace backfold::torch_layer {

// Neither autograd nor autocast has a say in how a packet is made.
struct Undisturbed {
  const at::AutoGradMode no_grad{false};
  const c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_CAPTURE_UNDISTURBED_H_
