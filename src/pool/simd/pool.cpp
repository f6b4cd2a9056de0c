// SPDX-License-Identifier: Apache-2.0
//
// Pooling, SIMD. Bands with anything unusual in them go to the reference.

#include "pool/simd/pool.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "pool/simd/pool.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>

#include "base/targets.h"
#include "pool/arithmetic.h"

// After foreach_target.h: compiled again for each target.
#include "base/simd/random-inl.h"
#include "pool/simd/band-inl.h"

HWY_BEFORE_NAMESPACE();
namespace backfold::cpu {
namespace HWY_NAMESPACE {
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128

// Never chosen (targets.cpp): the reference serves machines without SIMD.
PoolKernels pool_kernel_table() { return {}; }

#else

using core::Band;
using core::PoolParts;
using core::PoolShape;

// Appends up to 32 bits at a time to the codes of a band, and fills it with zeros.
class WordWriter {
 public:
  WordWriter(std::uint32_t* begin, std::uint32_t* end) : at_(begin), end_(end) {}
  void put(std::uint64_t value, int bits) {
    pending_ |= value << filled_;
    filled_ += bits;
    if (filled_ < 32) return;
    *at_++ = static_cast<std::uint32_t>(pending_);
    pending_ >>= 32;
    filled_ -= 32;
  }
  void finish() {
    if (filled_ > 0) *at_++ = static_cast<std::uint32_t>(pending_);
    std::fill(at_, end_, 0u);
  }

 private:
  std::uint32_t* at_;
  std::uint32_t* end_;
  std::uint64_t pending_ = 0;
  int filled_ = 0;
};

class WordReader {
 public:
  explicit WordReader(const std::uint32_t* begin) : at_(begin) {}
  std::uint32_t get(int bits) {
    if (left_ < bits) {
      pending_ |= std::uint64_t{*at_++} << left_;
      left_ += 32;
    }
    const std::uint64_t value = pending_ & ((std::uint64_t{1} << bits) - 1);
    pending_ >>= bits;
    left_ -= bits;
    return static_cast<std::uint32_t>(value);
  }

 private:
  const std::uint32_t* at_;
  std::uint64_t pending_ = 0;
  int left_ = 0;
};

// Bands of strips of kRoom places.
template <int kRoom>
class BandKernel {
 public:
  explicit BandKernel(const PoolShape& shape)
      : shape_(shape),
        levels_(core::levels_for(shape.bits, false, false)),
        in_word_(kRoom >= 8 && shape.bits <= 4 ? 8 : 4),
        elements_(shape) {}

  // False for a band that is left to the reference.
  template <typename T>
  bool pack(const Band& band, const T* source, core::MixedKey key, const PoolParts& parts) {
    elements_.load(band, source);
    if (!sum_strips() || !average_blocks(band, parts)) return false;
    if (shape_.bits == 0) return true;
    const core::Range range = find_range();
    if (core::form_of(range.header, levels_) != core::BandForm::kGrid) return false;
    parts.headers[band.index] = range.header;
    draw(band, range, key);
    WordWriter writer(parts.codes + band.word, parts.codes + band.end_word);
    for (int s = 0; s < shape_.slots; ++s) {
      const int elements = elements_.elements()[s];
      for (int j = 0; j < elements; j += in_word_) {
        const int bits = shape_.bits * std::min(in_word_, elements - j);
        writer.put(words_[j / in_word_][s] & ((std::uint64_t{1} << bits) - 1), bits);
      }
    }
    writer.finish();
    return true;
  }

  template <typename T>
  bool unpack(const Band& band, const PoolParts& parts, T* destination) {
    core::Grid grid{0.0f, 0.0f};
    if (shape_.bits != 0) {
      const std::uint32_t header = parts.headers[band.index];
      if (core::form_of(header, levels_) != core::BandForm::kGrid) return false;
      grid = core::grid_in(header, levels_);
    }
    for (int g = 0; g < band.rows; ++g) {
      const std::uint16_t* averages =
          parts.averages + band.first_block(shape_) + g * shape_.columns;
      for (int k = 0; k < band.columns; ++k) {
        const float base = core::block_base(core::bfloat_to_float(averages[k]), grid.base);
        if (!core::is_moderate_block(base, grid.step, levels_)) return false;
        averages_[k] = shape_.bits == 0 ? core::bfloat_to_float(averages[k]) : base;
      }
      spread(g, band.columns);
    }
    if (shape_.bits == 0) {
      for (int j = 0; j < kRoom; ++j) std::copy_n(base_, shape_.slots, elements_.row(j));
    } else {
      elements_.mark_strips(band);
      WordReader reader(parts.codes + band.word);
      for (int s = 0; s < shape_.slots; ++s) {
        const int elements = elements_.elements()[s];
        for (int j = 0; j < elements; j += in_word_)
          words_[j / in_word_][s] = reader.get(shape_.bits * std::min(in_word_, elements - j));
      }
      place(grid.step);
    }
    elements_.store(band, destination);
    return true;
  }

 private:
  static int lanes() { return static_cast<int>(hn::Lanes(DF())); }

  // core::strip_sum() of every strip; false where a sum is not finite.
  HWY_INLINE bool sum_strips() {
    const DF d;
    for (int s = 0; s < shape_.slots; s += lanes()) {
      const auto at = [&](int j) HWY_ATTR { return hn::LoadU(d, elements_.row(j) + s); };
      const auto pair = [&](int j, int half) HWY_ATTR { return hn::Add(at(j), at(j + half)); };
      const auto four = [&](int j, int half)
                            HWY_ATTR { return hn::Add(pair(j, half), pair(j + half / 2, half)); };
      const auto eight = [&](int j, int half)
                             HWY_ATTR { return hn::Add(four(j, half), four(j + half / 4, half)); };
      const VF sum = kRoom == 4   ? four(0, 2)
                     : kRoom == 8 ? eight(0, 4)
                                  : hn::Add(eight(0, 8), eight(1, 8));
      if (!hn::AllTrue(d, hn::IsFinite(sum))) return false;
      hn::StoreU(hn::Mul(sum, hn::Set(d, core::kSumScale)), d, sums_ + s);
    }
    return true;
  }

  // Writes the averages of the band's blocks, and each strip's to base_. False where one is too
  // large for the fast path.
  HWY_INLINE bool average_blocks(const Band& band, const PoolParts& parts) {
    const DF d;
    const DU du;
    const hn::Rebind<std::uint16_t, DF> d16;
    for (int g = 0; g < band.rows; ++g) {
      const core::BlockRow row = core::block_row(shape_, band.first_row + g);
      const int full = row.depth * row.height;
      const std::int64_t last = (shape_.wide - 1) * shape_.inner;  // first block of the last width
      const auto rest = static_cast<int>(shape_.width - (shape_.wide - 1) * shape_.block);
      const auto whole =
          static_cast<int>(std::clamp<std::int64_t>(last - band.first_column, 0, band.columns));
      std::fill(factors_, factors_ + whole, core::mean_factor(full * shape_.block));
      std::fill(factors_ + whole, factors_ + band.columns, core::mean_factor(full * rest));
      HWY_ALIGN std::uint16_t rounded[kStripRoom];
      for (int k = 0; k < band.columns; k += lanes()) {
        VF sum = hn::Zero(d);
        for (int r = 0; r < shape_.rows; ++r)
          sum = hn::Add(sum, hn::LoadU(d, sums_ + (g * shape_.rows + r) * shape_.run + k));
        const VF mean = hn::Mul(sum, hn::LoadU(d, factors_ + k));
        const auto there = hn::FirstN(d, static_cast<std::size_t>(band.columns - k));
        if (!hn::AllFalse(d, hn::And(there, hn::Gt(hn::Abs(mean), hn::Set(d, core::kHuge)))))
          return false;
        const VU bits = hn::BitCast(du, mean);
        const VU odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
        const VU average = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7fffu))));
        hn::StoreU(hn::BitCast(d, hn::ShiftLeft<16>(average)), d, averages_ + k);
        hn::StoreU(hn::TruncateTo(d16, average), d16, rounded + k);
      }
      std::copy_n(rounded, band.columns,
                  parts.averages + band.first_block(shape_) + g * shape_.columns);
      spread(g, band.columns);
    }
    return true;
  }

  // averages_ of block row g to its strips.
  HWY_INLINE void spread(int g, int columns) {
    const DF d;
    for (int r = 0; r < shape_.rows; ++r)
      for (int k = 0; k < columns; k += lanes())
        hn::StoreU(hn::LoadU(d, averages_ + k), d, base_ + (g * shape_.rows + r) * shape_.run + k);
  }

  HWY_INLINE core::Range find_range() {
    const DF d;
    const hn::Rebind<std::uint8_t, DF> d8;
    const hn::RebindToSigned<DF> di;
    VF low = hn::Set(d, INFINITY), high = hn::Set(d, -INFINITY);
    VF low_residual = low, high_residual = high;
    for (int s = 0; s < shape_.slots; s += lanes()) {
      const auto there = hn::PromoteTo(di, hn::LoadU(d8, elements_.elements() + s));
      VF least = hn::Set(d, INFINITY), most = hn::Set(d, -INFINITY);
      for (int j = 0; j < kRoom; ++j) {
        const VF x = hn::LoadU(d, elements_.row(j) + s);
        const auto real = hn::RebindMask(d, hn::Gt(there, hn::Set(di, j)));
        least = hn::Min(least, hn::IfThenElse(real, x, least));
        most = hn::Max(most, hn::IfThenElse(real, x, most));
      }
      // Strips without elements leave infinities less something finite.
      const VF average = hn::IfThenElseZero(hn::RebindMask(d, hn::Gt(there, hn::Zero(di))),
                                            hn::LoadU(d, base_ + s));
      low = hn::Min(low, least);
      high = hn::Max(high, most);
      low_residual = hn::Min(low_residual, hn::Sub(least, average));
      high_residual = hn::Max(high_residual, hn::Sub(most, average));
    }
    return core::band_range(hn::GetLane(hn::MinOfLanes(d, low)),
                            hn::GetLane(hn::MaxOfLanes(d, high)),
                            hn::GetLane(hn::MinOfLanes(d, low_residual)),
                            hn::GetLane(hn::MaxOfLanes(d, high_residual)), levels_);
  }

  // Random numbers and range of some strips.
  struct Draw {
    VU hash;
    VF shift, scale, count;
  };

  // The codes of elements first + kFirst to first + kFirst + 3, which have a hash with `first`.
  template <int kFirst>
  HWY_INLINE VU draw_quad(const Draw& draw, int first, int s) {
    const DF d;
    const DU du;
    const DI di;
    const VF one = hn::Set(d, 1.0f);
    const auto code = [&](int j) HWY_ATTR {
      const VU random = hn::Mul(draw.hash, hn::Set(du, core::element_multiplier(kFirst + j)));
      const VF uniform = unit_interval(random);
      const VF value = hn::LoadU(d, elements_.row(first + kFirst + j) + s);
      const VF share = hn::Clamp(hn::MulAdd(value, draw.scale, draw.shift), hn::Zero(d), one);
      const VF raised = hn::MulAdd(share, draw.count, uniform);
      return hn::Sub(hn::BitCast(du, hn::ConvertTo(di, raised)), hn::Set(du, 1u));
    };
    const int bits = shape_.bits;
    return hn::Or(
        hn::Or(code(0), hn::ShiftLeftSame(code(1), bits)),
        hn::Or(hn::ShiftLeftSame(code(2), 2 * bits), hn::ShiftLeftSame(code(3), 3 * bits)));
  }

  // The codes of every strip, to words_.
  HWY_INLINE void draw(const Band& band, const core::Range& range, core::MixedKey key) {
    const DF d;
    const DU du;
    const std::uint64_t first_draw = static_cast<std::uint64_t>(band.index) *
                                     static_cast<std::uint64_t>(shape_.slots * shape_.draws());
    const std::uint32_t offset =
        static_cast<std::uint32_t>(first_draw) + core::block_offset(key, first_draw);
    const VU draws = hn::Set(du, static_cast<std::uint32_t>(shape_.draws()));
    Draw own;
    const core::BandDraw in_band = core::band_draw(range.inverse, levels_);
    own.scale = hn::Set(d, in_band.scale);
    own.count = hn::Set(d, in_band.count);
    for (int s = 0; s < shape_.slots; s += lanes()) {
      const VF base = hn::Add(hn::LoadU(d, base_ + s), hn::Set(d, range.base));
      own.shift = hn::Neg(hn::Mul(base, own.scale));
      const VU strip = hn::Mul(hn::Iota(du, static_cast<std::uint32_t>(s)), draws);
      for (int first = 0; first < kRoom; first += core::kRandomBlock) {
        const VU block =
            hn::Add(strip, hn::Set(du, offset + static_cast<std::uint32_t>(first / 8)));
        own.hash = block_hash(block, key.second);
        const VU low = draw_quad<0>(own, first, s);
        if constexpr (kRoom == 4) {
          hn::StoreU(low, du, words_[0] + s);
        } else {
          const VU high = draw_quad<4>(own, first, s);
          if (in_word_ == 8) {
            hn::StoreU(hn::Or(low, hn::ShiftLeftSame(high, 4 * shape_.bits)), du,
                       words_[first / 8] + s);
          } else {
            hn::StoreU(low, du, words_[first / 4] + s);
            hn::StoreU(high, du, words_[first / 4 + 1] + s);
          }
        }
      }
    }
  }

  // The elements that words_ decode to.
  HWY_INLINE void place(float step) {
    const DF d;
    const DU du;
    const DI di;
    const VU mask = hn::Set(du, (1u << shape_.bits) - 1u);
    for (int s = 0; s < shape_.slots; s += lanes()) {
      const VF base = hn::LoadU(d, base_ + s);
      for (int first = 0; first < kRoom; first += in_word_) {
        VU codes = hn::LoadU(du, words_[first / in_word_] + s);
        for (int j = first; j < first + in_word_; ++j) {
          const VF number = hn::ConvertTo(d, hn::BitCast(di, hn::And(codes, mask)));
          hn::StoreU(hn::MulAdd(number, hn::Set(d, step), base), d, elements_.row(j) + s);
          codes = hn::ShiftRightSame(codes, shape_.bits);
        }
      }
    }
  }

  const PoolShape& shape_;
  core::Levels levels_;
  int in_word_;  // codes of a word of words_
  BandElements elements_;
  HWY_ALIGN float sums_[kStripRoom] = {};
  HWY_ALIGN float factors_[kStripRoom] = {};
  HWY_ALIGN float averages_[kStripRoom] = {};  // of one block row
  HWY_ALIGN float base_[kStripRoom] = {};      // of each strip: its block's average, or code 0
  HWY_ALIGN std::uint32_t words_[kRoom / 4][kStripRoom] = {};  // codes of each strip
};

// Calls work with the kernel for a shape's strips.
template <typename Work>
HWY_INLINE void with_kernel(const PoolShape& shape, const Work& work) {
  if (shape.room == 4) {
    BandKernel<4> kernel(shape);
    work(kernel);
  } else if (shape.room == 8) {
    BandKernel<8> kernel(shape);
    work(kernel);
  } else {
    BandKernel<16> kernel(shape);
    work(kernel);
  }
}

void pack_bands(const PoolShape& shape, ElementType type, const void* source, core::MixedKey key,
                const PoolParts& parts, std::int64_t begin, std::int64_t end) {
  with_kernel(shape, [&](auto& kernel) HWY_ATTR {
    core::with_element(type, [&]<typename T>() HWY_ATTR {
      for (std::int64_t band = begin; band < end; ++band)
        if (!kernel.pack(core::band_of(shape, band), static_cast<const T*>(source), key, parts))
          core::reference_pack_band(shape, type, source, key, parts, band);
    });
  });
}

void unpack_bands(const PoolShape& shape, ElementType type, const PoolParts& parts,
                  void* destination, std::int64_t begin, std::int64_t end) {
  with_kernel(shape, [&](auto& kernel) HWY_ATTR {
    core::with_element(type, [&]<typename T>() HWY_ATTR {
      for (std::int64_t band = begin; band < end; ++band)
        if (!kernel.unpack(core::band_of(shape, band), parts, static_cast<T*>(destination)))
          core::reference_unpack_band(shape, type, parts, destination, band);
    });
  });
}

PoolKernels pool_kernel_table() { return {HWY_TARGET, pack_bands, unpack_bands}; }

#endif  // HWY_TARGET
}  // namespace HWY_NAMESPACE
}  // namespace backfold::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace backfold::cpu {

HWY_EXPORT(pool_kernel_table);

PoolKernels pool_kernels(std::int64_t target_bit) {
  return BACKFOLD_KERNELS_FOR(pool_kernel_table, target_bit)();
}

}  // namespace backfold::cpu
#endif  // HWY_ONCE
