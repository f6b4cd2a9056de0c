// SPDX-License-Identifier: Apache-2.0

#include "lossless/simd/narrow.h"

#include "base/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "lossless/simd/narrow.cpp"
#include <hwy/foreach_target.h>

#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace backfold::cpu {
namespace HWY_NAMESPACE {
#if HWY_TARGET == HWY_EMU128 || HWY_TARGET == HWY_SCALAR

NarrowKernels narrow_kernel_table() { return {}; }

#else

namespace hn = hwy::HWY_NAMESPACE;

// Codes as elements. Highway widens 8 and 16 bits to 64 by way of 32.
template <class D, typename Code>
HWY_INLINE hn::Vec<D> load_codes(D d, const Code* codes) {
  const auto loaded = hn::LoadU(hn::Rebind<Code, D>(), codes);
  if constexpr (sizeof(hn::TFromD<D>) == 8 && sizeof(Code) < 4)
    return hn::PromoteTo(d, hn::PromoteTo(hn::Rebind<std::uint32_t, D>(), loaded));
  else
    return hn::PromoteTo(d, loaded);
}

template <typename Element, typename Code>
void encode_elements(const core::NarrowCode& code, const void* source, std::int64_t count,
                     void* codes) {
  const Element* HWY_RESTRICT from = static_cast<const Element*>(source);
  Code* HWY_RESTRICT to = static_cast<Code*>(codes);
  const hn::ScalableTag<Element> d;
  const hn::Rebind<Code, decltype(d)> d_code;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto low = hn::Set(d, static_cast<Element>(code.low));
  const auto sentinel = hn::Set(d, static_cast<Element>(code.sentinel));
  const auto sentinel_code = hn::Set(d, static_cast<Element>(code.sentinel_code));

  std::int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto element = hn::LoadU(d, from + i);
    const auto wide =
        hn::IfThenElse(hn::Eq(element, sentinel), sentinel_code, hn::Sub(element, low));
    hn::StoreU(hn::TruncateTo(d_code, wide), d_code, to + i);
  }
  for (; i < count; ++i) to[i] = core::encode<Code>(code, from[i]);
}

template <typename Element, typename Code>
void decode_elements(const core::NarrowCode& code, const void* codes, std::int64_t count,
                     void* destination) {
  const Code* HWY_RESTRICT from = static_cast<const Code*>(codes);
  Element* HWY_RESTRICT to = static_cast<Element*>(destination);
  const hn::ScalableTag<Element> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto low = hn::Set(d, static_cast<Element>(code.low));
  const auto sentinel = hn::Set(d, static_cast<Element>(code.sentinel));
  const auto sentinel_code = hn::Set(d, static_cast<Element>(code.sentinel_code));

  std::int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto wide = load_codes(d, from + i);
    const auto element = hn::IfThenElse(hn::Eq(wide, sentinel_code), sentinel, hn::Add(wide, low));
    hn::StoreU(element, d, to + i);
  }
  for (; i < count; ++i) to[i] = core::decode<Element>(code, from[i]);
}

void encode(const core::NarrowCode& code, std::size_t element_bytes, const void* source,
            std::int64_t count, void* codes) {
  core::with_narrow_types(element_bytes, code.code_bytes, [&]<typename Element, typename Code>() {
    encode_elements<Element, Code>(code, source, count, codes);
  });
}

void decode(const core::NarrowCode& code, std::size_t element_bytes, const void* codes,
            std::int64_t count, void* destination) {
  core::with_narrow_types(element_bytes, code.code_bytes, [&]<typename Element, typename Code>() {
    decode_elements<Element, Code>(code, codes, count, destination);
  });
}

NarrowKernels narrow_kernel_table() { return {HWY_TARGET, encode, decode}; }

#endif
}  // namespace HWY_NAMESPACE
}  // namespace backfold::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace backfold::cpu {

HWY_EXPORT(narrow_kernel_table);

NarrowKernels narrow_kernels(std::int64_t target_bit) {
  return BACKFOLD_KERNELS_FOR(narrow_kernel_table, target_bit)();
}

}  // namespace backfold::cpu
#endif
