// SPDX-License-Identifier: Apache-2.0

#include "lossless/simd/bits.h"

#include <cstring>
#include <limits>
#include <type_traits>

#include "base/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "lossless/simd/bits.cpp"
#include <hwy/foreach_target.h>

#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace backfold::cpu {
namespace HWY_NAMESPACE {
#if HWY_TARGET == HWY_EMU128 || HWY_TARGET == HWY_SCALAR

BitKernels bit_kernel_table() { return {}; }

#else

namespace hn = hwy::HWY_NAMESPACE;

// Elements that make one 64-bit word of bits.
constexpr std::int64_t kWord = 64;

template <class D, class M>
HWY_INLINE std::uint64_t bits_of_mask(D d, M mask) {
  std::uint8_t bytes[8] = {};
  hn::StoreMaskBits(d, mask, bytes);
  std::uint64_t word;
  std::memcpy(&word, bytes, sizeof(word));
  return word;
}

// Lanes are signed: AVX2 has no unsigned comparison. Both sides of in_range()'s key - low <= span
// are moved by the lowest signed number, which turns it into a signed one.
template <class D>
class Range {
 public:
  using S = hn::TFromD<D>;
  using U = std::make_unsigned_t<S>;

  HWY_INLINE Range(D d, std::uint64_t low, std::uint64_t span)
      : origin_(hn::Set(d, moved(low))), limit_(hn::Set(d, moved(span))) {}

  HWY_INLINE auto excludes(hn::Vec<D> key) const { return hn::Gt(hn::Sub(key, origin_), limit_); }

 private:
  static constexpr S moved(std::uint64_t value) {
    return static_cast<S>(static_cast<U>(value) ^ static_cast<U>(std::numeric_limits<S>::min()));
  }
  hn::Vec<D> origin_;
  hn::Vec<D> limit_;
};

template <typename U, bool kHole>
void pack_elements(const core::BitTest& test, const U* HWY_RESTRICT source, std::int64_t count,
                   std::uint8_t* HWY_RESTRICT bits) {
  using S = std::make_signed_t<U>;
  const hn::CappedTag<S, kWord> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto magnitude = hn::Set(d, std::numeric_limits<S>::max());
  const Range range(d, test.low, test.span);
  const Range hole(d, test.hole_low, test.hole_span);
  const std::uint64_t flip = test.invert ? 0 : ~std::uint64_t{0};
  const S* from = reinterpret_cast<const S*>(source);

  std::int64_t i = 0;
  for (; i + kWord <= count; i += kWord) {
    std::uint64_t excluded = 0;
    for (std::int64_t j = 0; j < kWord; j += lanes) {
      const auto element = hn::LoadU(d, from + i + j);
      const auto key = hn::Xor(element, hn::And(hn::BroadcastSignBit(element), magnitude));
      auto out = range.excludes(key);
      if (kHole) out = hn::Or(out, hn::Not(hole.excludes(key)));
      excluded |= bits_of_mask(d, out) << j;
    }
    const std::uint64_t word = excluded ^ flip;
    std::memcpy(bits + i / 8, &word, sizeof(word));
  }
  const std::int64_t words_end = static_cast<std::int64_t>(core::bit_bytes(count)) * 8;
  for (; i < words_end; i += kWord) {
    std::uint64_t word = 0;
    for (std::int64_t j = 0; j < kWord && i + j < count; ++j)
      word |= std::uint64_t{core::evaluate(test, source[i + j])} << j;
    std::memcpy(bits + i / 8, &word, sizeof(word));
  }
}

template <typename U>
void unpack_elements(const core::BitValues& values, const std::uint8_t* HWY_RESTRICT bits,
                     std::int64_t count, U* HWY_RESTRICT destination) {
  const hn::CappedTag<U, kWord> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto if_true = hn::Set(d, static_cast<U>(values.if_true));
  const auto if_false = hn::Set(d, static_cast<U>(values.if_false));

  for (std::int64_t i = 0; i < count; i += kWord) {
    std::uint64_t word;
    std::memcpy(&word, bits + i / 8, sizeof(word));
    if (i + kWord > count) {
      for (std::int64_t j = 0; i + j < count; ++j)
        destination[i + j] =
            static_cast<U>((word >> j & 1) != 0 ? values.if_true : values.if_false);
      break;
    }
    for (std::int64_t j = 0; j < kWord; j += lanes) {
      const std::uint64_t rest = word >> j;
      std::uint8_t bytes[8];
      std::memcpy(bytes, &rest, sizeof(rest));
      const auto mask = hn::LoadMaskBits(d, bytes);
      hn::StoreU(hn::IfThenElse(mask, if_true, if_false), d, destination + i + j);
    }
  }
}

template <typename U>
void pack_as(const core::BitTest& test, const void* source, std::int64_t count,
             std::uint8_t* bits) {
  const U* elements = static_cast<const U*>(source);
  if (test.has_hole) return pack_elements<U, true>(test, elements, count, bits);
  pack_elements<U, false>(test, elements, count, bits);
}

void pack_bits(const core::BitTest& test, std::size_t element_bytes, const void* source,
               std::int64_t count, std::uint8_t* bits) {
  switch (element_bytes) {
    case 1:
      return pack_as<std::uint8_t>(test, source, count, bits);
    case 2:
      return pack_as<std::uint16_t>(test, source, count, bits);
    case 4:
      return pack_as<std::uint32_t>(test, source, count, bits);
    default:
      return pack_as<std::uint64_t>(test, source, count, bits);
  }
}

void unpack_bits(const core::BitValues& values, std::size_t element_bytes, const std::uint8_t* bits,
                 std::int64_t count, void* destination) {
  switch (element_bytes) {
    case 1:
      return unpack_elements(values, bits, count, static_cast<std::uint8_t*>(destination));
    case 2:
      return unpack_elements(values, bits, count, static_cast<std::uint16_t*>(destination));
    case 4:
      return unpack_elements(values, bits, count, static_cast<std::uint32_t*>(destination));
    default:
      return unpack_elements(values, bits, count, static_cast<std::uint64_t*>(destination));
  }
}

BitKernels bit_kernel_table() { return {HWY_TARGET, pack_bits, unpack_bits}; }

#endif
}  // namespace HWY_NAMESPACE
}  // namespace backfold::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace backfold::cpu {

HWY_EXPORT(bit_kernel_table);

BitKernels bit_kernels(std::int64_t target_bit) {
  return BACKFOLD_KERNELS_FOR(bit_kernel_table, target_bit)();
}

}  // namespace backfold::cpu
#endif
