// SPDX-License-Identifier: Apache-2.0

#include "ranged/simd/ranged.h"

#include <algorithm>
#include <limits>

#include "base/targets.h"
#include "base/widths.h"
#include "ranged/reference.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ranged/simd/ranged.cpp"
#include <hwy/foreach_target.h>

#include <hwy/highway.h>

#include "base/simd/elements-inl.h"
#include "base/simd/random-inl.h"

HWY_BEFORE_NAMESPACE();
namespace backfold::cpu {
namespace HWY_NAMESPACE {
#if HWY_TARGET == HWY_EMU128 || HWY_TARGET == HWY_SCALAR

RangedKernels ranged_kernel_table() { return {}; }

#else

using core::Bounds;
using core::Grid;

// Elements that are worked on at a time. Blocks start on multiples of it, so the upper half of a
// random number's block is the same for all of one.
constexpr int kBlock = core::kBitBlock;

// Low, and step or its inverse, of each element of a block.
template <bool kInverse>
class BlockGrids {
 public:
  BlockGrids(const RangedFormat& format, const Grid* grids) : format_(format), grids_(grids) {}

  // Fills the tables for elements `first` to `first + count - 1`; leaves them alone where they hold
  // the one channel that all of these elements are in.
  void fill(std::int64_t first, int count) {
    std::int64_t run = first / format_.inner;
    std::int64_t left = format_.inner - first % format_.inner;
    std::int64_t channel = run % format_.channels;
    if (left >= count && channel == held_) return;
    held_ = left >= count && count == kBlock ? channel : -1;
    decodable_ = true;
    const core::Levels levels = core::ranged_levels(format_.bits);
    for (int i = 0; i < count;) {
      if (format_.inner == 1) {
        const int end =
            static_cast<int>(std::min<std::int64_t>(count, i + format_.channels - channel));
        put_row(i, end, grids_ + channel, levels);
        channel += end - i;
        i = end;
      } else {
        const int end = static_cast<int>(std::min<std::int64_t>(count, i + left));
        put(i, grids_[channel++], levels);
        std::fill(low_ + i + 1, low_ + end, low_[i]);
        std::fill(scale_ + i + 1, scale_ + end, scale_[i]);
        i = end;
        left = format_.inner;
      }
      if (channel == format_.channels) channel = 0;
    }
  }

  const float* low() const { return low_; }
  const float* scale() const { return scale_; }
  bool decodable() const { return decodable_; }

 private:
  void put(int i, const Grid& grid, const core::Levels& levels) {
    low_[i] = grid.base;
    scale_[i] = kInverse ? core::inverse_of(grid.step) : grid.step;
    if (!kInverse) decodable_ = decodable_ && core::decodes(grid, levels);
  }

  // put() for elements i to end - 1, each with a channel of its own.
  void put_row(int i, int end, const Grid* grids, const core::Levels& levels) {
    const DF d;
    const int lanes = static_cast<int>(hn::Lanes(d));
    for (; i + lanes <= end; i += lanes, grids += lanes) {
      VF low, step;
      hn::LoadInterleaved2(d, reinterpret_cast<const float*>(grids), low, step);
      hn::StoreU(low, d, low_ + i);
      if constexpr (kInverse) {
        const VF inverse = hn::Div(hn::Set(d, 1.0f), step);
        hn::StoreU(hn::IfThenElseZero(hn::Gt(step, hn::Zero(d)), inverse), d, scale_ + i);
      } else {
        const VF span = hn::Mul(hn::Set(d, levels.count), hn::Abs(step));
        const auto decodes = hn::Le(hn::Add(hn::Abs(low), span), hn::Set(d, core::kDecodable));
        decodable_ = decodable_ && hn::AllTrue(d, decodes);
        hn::StoreU(step, d, scale_ + i);
      }
    }
    for (; i < end; ++i) put(i, *grids++, levels);
  }

  const RangedFormat& format_;
  const Grid* grids_;
  std::int64_t held_ = -1;
  bool decodable_ = true;
  alignas(64) float low_[kBlock];
  alignas(64) float scale_[kBlock];
};

// Random numbers of the elements of a block, in [1, 2).
class BlockUniforms {
 public:
  HWY_INLINE BlockUniforms(core::MixedKey key, std::int64_t first) : second_(key.second) {
    const std::uint64_t block = static_cast<std::uint64_t>(first) / core::kRandomBlock;
    start_ = core::block_offset(key, block) + static_cast<std::uint32_t>(block);
    for (int i = 0; i < 16; ++i) multipliers_[i] = core::element_multiplier(i % core::kRandomBlock);
  }

  HWY_INLINE VF at(int i) const {
    const DU du;
    const VU index = hn::Iota(du, static_cast<std::uint32_t>(i));
    const VU hash = block_hash(hn::Add(hn::Set(du, start_), hn::ShiftRight<3>(index)), second_);
    return unit_interval(hn::Mul(hash, hn::LoadU(du, multipliers_ + i % core::kRandomBlock)));
  }

 private:
  std::uint32_t start_;
  std::uint32_t second_;
  std::uint32_t multipliers_[16];
};

template <typename T, int kBits>
bool pack_elements(const RangedFormat& format, const T* HWY_RESTRICT source, const Grid* grids,
                   core::MixedKey key, std::int64_t first, std::int64_t count,
                   std::uint8_t* HWY_RESTRICT codes) {
  const DF d;
  const hn::Rebind<std::uint8_t, DF> d8;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const core::Levels levels = core::ranged_levels(kBits);
  BlockGrids<true> tables(format, grids);
  VF witness = hn::Zero(d);  // NaN once an element was not finite
  bool finite = true;
  for (std::int64_t at = first; at < first + count; at += kBlock) {
    const int size = static_cast<int>(std::min<std::int64_t>(kBlock, first + count - at));
    tables.fill(at, size);
    const BlockUniforms uniforms(key, at);
    alignas(64) std::uint8_t drawn[kBlock];
    int i = 0;
    for (; i + lanes <= size; i += lanes) {
      const VF x = load_numbers(d, source + at + i);
      witness = hn::MulAdd(x, hn::Zero(d), witness);
      const VF low = hn::Load(d, tables.low() + i);
      const VF raised = hn::MulAdd(hn::Sub(hn::Max(x, low), low), hn::Load(d, tables.scale() + i),
                                   uniforms.at(i));
      const VF clamped = hn::Min(raised, hn::Set(d, levels.ceiling));
      const auto code = hn::Sub(hn::ConvertTo(DI(), clamped), hn::Set(DI(), 1));
      hn::StoreU(hn::DemoteTo(d8, code), d8, drawn + i);
    }
    for (; i < size; ++i) {
      const float value = core::to_float(source[at + i]);
      finite = finite && core::is_finite(value);
      drawn[i] = static_cast<std::uint8_t>(
          core::ranged_draw(value, {tables.low()[i], 0.0f}, tables.scale()[i],
                            core::uniform_of(key, at + i), levels));
    }
    while (i % 8 != 0) drawn[i++] = 0;
    core::fold_block<kBits>(drawn, size, codes + at / 8 * kBits);
  }
  return finite && hn::AllTrue(d, hn::Eq(witness, witness));
}

template <typename T, int kBits>
void unpack_elements(const RangedFormat& format, const Grid* grids,
                     const std::uint8_t* HWY_RESTRICT codes, std::int64_t first, std::int64_t count,
                     T* HWY_RESTRICT destination) {
  const DF d;
  const hn::Rebind<std::uint8_t, DF> d8;
  const int lanes = static_cast<int>(hn::Lanes(d));
  BlockGrids<false> tables(format, grids);
  for (std::int64_t at = first; at < first + count; at += kBlock) {
    const int size = static_cast<int>(std::min<std::int64_t>(kBlock, first + count - at));
    tables.fill(at, size);
    if (!tables.decodable()) {
      core::reference_unpack_ranged(format, grids, codes, at, size, destination);
      continue;
    }
    alignas(64) std::uint8_t spread[kBlock];
    core::spread_block<kBits>(codes + at / 8 * kBits, size, spread);
    int i = 0;
    for (; i + lanes <= size; i += lanes) {
      const VF code = hn::ConvertTo(d, hn::PromoteTo(DI(), hn::LoadU(d8, spread + i)));
      const VF value =
          hn::MulAdd(code, hn::Load(d, tables.scale() + i), hn::Load(d, tables.low() + i));
      store_elements<false>(d, value, destination + at + i);
    }
    for (; i < size; ++i)
      destination[at + i] =
          core::from_float<T>(core::value_of(spread[i], {tables.low()[i], tables.scale()[i]}));
  }
}

using VI = hn::Vec<DI>;

// Integers that order like the numbers (base/bits.h), and back: the map is its own inverse.
HWY_INLINE VI keys_of(VF x) {
  const DI di;
  const VI bits = hn::BitCast(di, x);
  const VI magnitude = hn::Set(di, std::numeric_limits<std::int32_t>::max());
  return hn::Xor(bits, hn::And(hn::BroadcastSignBit(bits), magnitude));
}

// Keys of a vector, for the lower and for the upper bound: those of infinities of the sign that
// changes nothing where elements are not finite.
struct BoundKeys {
  VI low, high;

  HWY_INLINE explicit BoundKeys(VF x) {
    const DF d;
    const auto finite = hn::IsFinite(x);
    low = keys_of(hn::IfThenElse(finite, x, hn::Inf(d)));
    high = keys_of(hn::IfThenElse(finite, x, hn::Neg(hn::Inf(d))));
  }
};

template <typename T>
void widen_run_of(const T* source, std::int64_t count, Bounds* bounds) {
  const DF d;
  const DI di;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t i = 0;
  if (count >= lanes) {
    VI low = keys_of(hn::Set(d, bounds->low)), high = keys_of(hn::Set(d, bounds->high));
    for (; i + lanes <= count; i += lanes) {
      const BoundKeys found(load_numbers(d, source + i));
      low = hn::Min(low, found.low);
      high = hn::Max(high, found.high);
    }
    const auto least = static_cast<std::uint32_t>(hn::GetLane(hn::MinOfLanes(di, low)));
    const auto most = static_cast<std::uint32_t>(hn::GetLane(hn::MaxOfLanes(di, high)));
    *bounds = {core::float_of(core::order_key(least)), core::float_of(core::order_key(most))};
  }
  for (; i < count; ++i) {
    const float value = core::to_float(source[i]);
    if (core::is_finite(value)) *bounds = core::joined(*bounds, {value, value});
  }
}

template <typename T>
void widen_row_of(const T* source, std::int64_t count, Bounds* bounds) {
  const DF d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  float* pairs = reinterpret_cast<float*>(bounds);
  std::int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const BoundKeys found(load_numbers(d, source + i));
    VF low, high;
    hn::LoadInterleaved2(d, pairs + 2 * i, low, high);
    low = hn::BitCast(d, hn::Min(keys_of(low), found.low));
    high = hn::BitCast(d, hn::Max(keys_of(high), found.high));
    hn::StoreInterleaved2(hn::BitCast(d, keys_of(low)), hn::BitCast(d, keys_of(high)), d,
                          pairs + 2 * i);
  }
  for (; i < count; ++i) widen_run_of(source + i, 1, bounds + i);
}

bool pack(const RangedFormat& format, const void* source, const Grid* grids, core::MixedKey key,
          std::int64_t first, std::int64_t count, std::uint8_t* codes) {
  return core::with_element(format.type, [&]<typename T>() {
    const T* elements = static_cast<const T*>(source);
    return core::with_width<core::kRangedWidths>(format.bits, [&]<int kBits>() {
      return pack_elements<T, kBits>(format, elements, grids, key, first, count, codes);
    });
  });
}

void unpack(const RangedFormat& format, const Grid* grids, const std::uint8_t* codes,
            std::int64_t first, std::int64_t count, void* destination) {
  core::with_element(format.type, [&]<typename T>() {
    T* elements = static_cast<T*>(destination);
    core::with_width<core::kRangedWidths>(format.bits, [&]<int kBits>() {
      unpack_elements<T, kBits>(format, grids, codes, first, count, elements);
    });
  });
}

void widen_run(ElementType type, const void* source, std::int64_t count, Bounds* bounds) {
  core::with_element(
      type, [&]<typename T>() { widen_run_of(static_cast<const T*>(source), count, bounds); });
}

void widen_row(ElementType type, const void* source, std::int64_t count, Bounds* bounds) {
  core::with_element(
      type, [&]<typename T>() { widen_row_of(static_cast<const T*>(source), count, bounds); });
}

RangedKernels ranged_kernel_table() { return {HWY_TARGET, pack, unpack, widen_run, widen_row}; }

#endif
}  // namespace HWY_NAMESPACE
}  // namespace backfold::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace backfold::cpu {

HWY_EXPORT(ranged_kernel_table);

RangedKernels ranged_kernels(std::int64_t target_bit) {
  return BACKFOLD_KERNELS_FOR(ranged_kernel_table, target_bit)();
}

}  // namespace backfold::cpu
#endif
