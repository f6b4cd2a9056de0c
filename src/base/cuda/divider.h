// SPDX-License-Identifier: Apache-2.0

#ifndef BACKFOLD_BASE_CUDA_DIVIDER_H_
#define BACKFOLD_BASE_CUDA_DIVIDER_H_

#include <cstdint>

namespace backfold::cuda {

// Division by a number below 2^31 that all threads share: three instructions in place of twenty.
// (Aligned so that multiplier and shift are loaded together.)
class alignas(8) Divider {
 public:
  Divider() = default;
  explicit Divider(std::int64_t divisor) : shift_(0), divisor_(static_cast<unsigned>(divisor)) {
    while ((1ull << shift_) < divisor_) ++shift_;
    multiplier_ = static_cast<unsigned>(((1ull << (31 + shift_)) + divisor_ - 1) / divisor_);
  }
  // number * multiplier / 2^(31 + shift), for numbers below 2^31: the multiplier is less than
  // 1 / 2^31 of itself too large.
  __device__ unsigned quotient(unsigned number) const {
    return __umulhi(2 * number, multiplier_) >> shift_;
  }
  __device__ int quotient(int number) const {
    return static_cast<int>(quotient(static_cast<unsigned>(number)));
  }
  __device__ unsigned remainder(unsigned number) const {
    return number - quotient(number) * divisor_;
  }

 private:
  unsigned multiplier_;
  int shift_;
  unsigned divisor_;
};

}  // namespace backfold::cuda

#endif  // BACKFOLD_BASE_CUDA_DIVIDER_H_
