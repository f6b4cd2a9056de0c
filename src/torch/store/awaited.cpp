// SPDX-License-Identifier: Apache-2.0

#include "torch/store/awaited.h"

#include <utility>

namespace backfold::torch_layer {

void Awaited::add_reader() {
  const std::lock_guard lock(mutex_);
  ++readers_;
}

void Awaited::add_user() {
  const std::lock_guard lock(mutex_);
  ++users_;
}

Awaited::Came Awaited::reader_came() {
  const std::lock_guard lock(mutex_);
  if (readers_ > 0) --readers_;
  if (readers_ + users_ > 0) return {};
  return {true, std::exchange(kept_, std::nullopt)};
}

Awaited::Came Awaited::user_came() {
  const std::lock_guard lock(mutex_);
  if (users_ == 0 || --users_ + readers_ > 0) return {};
  return {true, std::exchange(kept_, std::nullopt)};
}

void Awaited::keep(Memory made) {
  const std::lock_guard lock(mutex_);
  if (readers_ + users_ > 0 && !kept_) std::swap(kept_, made);
}

Awaited::Memory Awaited::give_up() {
  const std::lock_guard lock(mutex_);
  return std::exchange(kept_, std::nullopt);
}

int Awaited::readers() const {
  const std::lock_guard lock(mutex_);
  return readers_;
}

}  // namespace backfold::torch_layer
