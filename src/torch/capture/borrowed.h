// SPDX-License-Identifier: Apache-2.0

#ifndef BACKFOLD_TORCH_CAPTURE_BORROWED_H_
#define BACKFOLD_TORCH_CAPTURE_BORROWED_H_

#include <ATen/core/Tensor.h>

namespace backfold::torch_layer {

// A tensor that a running call has, while it runs. Counts no reference: from the first to the
// second, and back, torch takes Python's lock.
class Borrowed {
 public:
  explicit Borrowed(c10::TensorImpl* tensor)
      : tensor_(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim(tensor)) {}
  ~Borrowed() { tensor_.unsafeReleaseTensorImpl(); }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;

  const at::Tensor& operator*() const { return tensor_; }

 private:
  at::Tensor tensor_;
};

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_CAPTURE_BORROWED_H_
