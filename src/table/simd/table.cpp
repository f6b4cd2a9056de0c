// SPDX-License-Identifier: Apache-2.0

#include "table/simd/table.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "base/bits.h"
#include "base/targets.h"
#include "base/widths.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "table/simd/table.cpp"
#include <hwy/foreach_target.h>

#include <hwy/highway.h>

#include "base/simd/elements-inl.h"

HWY_BEFORE_NAMESPACE();
namespace backfold::cpu {
namespace HWY_NAMESPACE {
#if HWY_TARGET == HWY_EMU128 || HWY_TARGET == HWY_SCALAR

TableKernels table_kernel_table() { return {}; }

#else

constexpr int kBlock = core::kBitBlock;  // elements that are worked on at a time

template <typename T, int kBits>
void pack_elements(const core::TableCode& table, const T* HWY_RESTRICT source, std::int64_t count,
                   std::uint8_t* HWY_RESTRICT low, std::uint8_t* HWY_RESTRICT high) {
  const DF d;
  const DI di;
  const hn::Rebind<std::uint8_t, DF> d8;
  const int lanes = static_cast<int>(hn::Lanes(d));
  for (std::int64_t at = 0; at < count; at += kBlock) {
    const int size = static_cast<int>(std::min<std::int64_t>(kBlock, count - at));
    alignas(64) std::uint8_t codes[kBlock];
    int i = 0;
    for (; i + lanes <= size; i += lanes) {
      const VF x = load_numbers(d, source + at + i);
      auto code = hn::Zero(di);
      // A mask is -1 where it holds.
      for (int k = 0; k < (1 << kBits) - 1; ++k)
        code = hn::Sub(
            code, hn::VecFromMask(di, hn::RebindMask(di, hn::Ge(x, hn::Set(d, table.bounds[k])))));
      hn::StoreU(hn::DemoteTo(d8, code), d8, codes + i);
    }
    for (; i < size; ++i)
      codes[i] = static_cast<std::uint8_t>(core::cell_of(table, core::to_float(source[at + i])));
    while (i % 8 != 0) codes[i++] = 0;
    if constexpr (kBits == 3) {
      core::fold_block<2>(codes, size, low + at / 8 * 2);
      core::fold_block<1, 2>(codes, size, high + at / 8);
    } else {
      core::fold_block<kBits>(codes, size, low + at / 8 * kBits);
    }
  }
}

// values[code] for a vector of codes: a tree of 2^kBits - 1 choices, by the codes' bits from the
// lowest up. Slower than a shuffle where one exists for the width, and there for every width.
template <int kBits, class D, class V>
HWY_INLINE V look_up(D d, V codes, const hn::TFromD<D>* values) {
  using U = hn::TFromD<D>;
  const auto has_bit = [&](int bit) HWY_ATTR {
    return hn::TestBit(codes, hn::Set(d, static_cast<U>(U{1} << bit)));
  };
  const auto first = has_bit(0);
  const auto leaf = [&](int i) HWY_ATTR {
    return hn::IfThenElse(first, hn::Set(d, values[i + 1]), hn::Set(d, values[i]));
  };
  if constexpr (kBits == 1) {
    return leaf(0);
  } else {
    const auto second = has_bit(1);
    const auto four = [&](int i) HWY_ATTR { return hn::IfThenElse(second, leaf(i + 2), leaf(i)); };
    if constexpr (kBits == 2) {
      return four(0);
    } else {
      const auto third = has_bit(2);
      const auto eight = [&](int i)
                             HWY_ATTR { return hn::IfThenElse(third, four(i + 4), four(i)); };
      if constexpr (kBits == 3)
        return eight(0);
      else
        return hn::IfThenElse(has_bit(3), eight(8), eight(0));
    }
  }
}

// Codes, one to a byte, as lanes of the elements' width.
template <class D>
HWY_INLINE hn::Vec<D> widened(D d, const std::uint8_t* codes) {
  const auto bytes = hn::LoadU(hn::Rebind<std::uint8_t, D>(), codes);
  if constexpr (sizeof(hn::TFromD<D>) == 8)
    return hn::PromoteTo(d, hn::PromoteTo(hn::Rebind<std::uint32_t, D>(), bytes));
  else
    return hn::PromoteTo(d, bytes);
}

template <typename U, int kBits>
void unpack_elements(const core::TableCode& table, const std::uint8_t* HWY_RESTRICT low,
                     const std::uint8_t* HWY_RESTRICT high, std::int64_t count,
                     U* HWY_RESTRICT destination) {
  const hn::CappedTag<U, kBlock> d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  U values[1 << kBits];
  for (int i = 0; i < 1 << kBits; ++i) std::memcpy(&values[i], &table.values[i], sizeof(U));
  for (std::int64_t at = 0; at < count; at += kBlock) {
    const int size = static_cast<int>(std::min<std::int64_t>(kBlock, count - at));
    alignas(64) std::uint8_t codes[kBlock];
    if constexpr (kBits == 3) {
      core::spread_block<2>(low + at / 8 * 2, size, codes);
      core::spread_block<1, 2>(high + at / 8, size, codes);
    } else {
      core::spread_block<kBits>(low + at / 8 * kBits, size, codes);
    }
    int i = 0;
    for (; i + lanes <= size; i += lanes)
      hn::StoreU(look_up<kBits>(d, widened(d, codes + i), values), d, destination + at + i);
    for (; i < size; ++i) destination[at + i] = values[codes[i]];
  }
}

void pack(const core::TableCode& table, ElementType type, const void* source, std::int64_t count,
          std::uint8_t* low, std::uint8_t* high) {
  core::with_element(type, [&]<typename T>() {
    core::with_width<core::kTableWidths>(table.bits, [&]<int kBits>() {
      pack_elements<T, kBits>(table, static_cast<const T*>(source), count, low, high);
    });
  });
}

void unpack(const core::TableCode& table, ElementType type, const std::uint8_t* low,
            const std::uint8_t* high, std::int64_t count, void* destination) {
  core::with_width<core::kTableWidths>(table.bits, [&]<int kBits>() {
    switch (size_of(type)) {
      case 2:
        return unpack_elements<std::uint16_t, kBits>(table, low, high, count,
                                                     static_cast<std::uint16_t*>(destination));
      case 4:
        return unpack_elements<std::uint32_t, kBits>(table, low, high, count,
                                                     static_cast<std::uint32_t*>(destination));
      default:
        return unpack_elements<std::uint64_t, kBits>(table, low, high, count,
                                                     static_cast<std::uint64_t*>(destination));
    }
  });
}

TableKernels table_kernel_table() { return {HWY_TARGET, pack, unpack}; }

#endif
}  // namespace HWY_NAMESPACE
}  // namespace backfold::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace backfold::cpu {

HWY_EXPORT(table_kernel_table);

TableKernels table_kernels(std::int64_t target_bit) {
  return BACKFOLD_KERNELS_FOR(table_kernel_table, target_bit)();
}

}  // namespace backfold::cpu
#endif
