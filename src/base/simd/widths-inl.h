// SPDX-License-Identifier: Apache-2.0
//
// From a width at run time to kernels compiled for it.

#if defined(BACKFOLD_BASE_SIMD_WIDTHS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BACKFOLD_BASE_SIMD_WIDTHS_INL_H_
#undef BACKFOLD_BASE_SIMD_WIDTHS_INL_H_
#else
#define BACKFOLD_BASE_SIMD_WIDTHS_INL_H_
#endif

#include <hwy/highway.h>

#include <type_traits>

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
HWY_BEFORE_NAMESPACE();
namespace backfold::cpu {
namespace HWY_NAMESPACE {

// Calls work with std::integral_constant<int, bits>.
template <typename Work>
HWY_INLINE void with_bits(int bits, Work work) {
  switch (bits) {
    case 1:
      return work(std::integral_constant<int, 1>());
    case 2:
      return work(std::integral_constant<int, 2>());
    case 3:
      return work(std::integral_constant<int, 3>());
    case 4:
      return work(std::integral_constant<int, 4>());
    case 5:
      return work(std::integral_constant<int, 5>());
    case 6:
      return work(std::integral_constant<int, 6>());
    case 8:
      return work(std::integral_constant<int, 8>());
    default:
      return work(std::integral_constant<int, 16>());
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace backfold::cpu
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET

#endif  // BACKFOLD_BASE_SIMD_WIDTHS_INL_H_
