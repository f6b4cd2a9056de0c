// SPDX-License-Identifier: Apache-2.0
//
// Tensors that were made again lately and have more readers to come.
//
// The readers of a chain follow one another: three projections read one norm's result, a product
// and an activation what the next layer has just had. The last two tensors are kept for them; older
// ones are made again if they are asked for, as a reader may be at the other end of the network.

#ifndef BACKFOLD_TORCH_STORE_RECENT_H_
#define BACKFOLD_TORCH_STORE_RECENT_H_

#include <c10/core/Storage.h>

namespace backfold::torch_layer {

// Keeps the storage until `owner` drops it or two newer ones of its device come.
void keep_recent(const void* owner, const c10::Storage& storage);
void drop_recent(const void* owner);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_STORE_RECENT_H_
