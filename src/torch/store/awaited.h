// SPDX-License-Identifier: Apache-2.0
//
// Who is still to ask for a derived tensor, and its memory where that is kept for them.
//
// A graph that Python collects counts itself out, on any thread, under Python's lock. To copy or
// free memory that Python has seen may wait for that lock. So neither is done under the one here,
// and it is not the one under which tensors are made.

#ifndef BACKFOLD_TORCH_STORE_AWAITED_H_
#define BACKFOLD_TORCH_STORE_AWAITED_H_

#include <c10/core/Storage.h>

#include <mutex>
#include <optional>

namespace backfold::torch_layer {

class Awaited {
 public:
  // What is kept no longer, for the caller to free.
  using Memory = std::optional<c10::Storage>;

  void add_reader();
  void add_user();

  struct Came {
    bool last = false;  // nobody else is expected
    Memory given_up = {};
  };
  Came reader_came();
  // `last` is false where no user was expected.
  Came user_came();

  // Kept until the last who is expected has come. Not where nobody is, or some is kept already.
  void keep(Memory made);
  Memory give_up();

  // Readers that are expected.
  int readers() const;

 private:
  mutable std::mutex mutex_;
  int readers_ = 0;
  int users_ = 0;  // tensors that are made from it
  Memory kept_;
};

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_STORE_AWAITED_H_
