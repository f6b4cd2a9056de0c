// SPDX-License-Identifier: Apache-2.0

#include "pool/reference.h"

#include <algorithm>
#include <cmath>

#include "pool/arithmetic.h"

namespace backfold::core {
namespace {

float sum_of(const float (&x)[kMaxStrip], int room) {
  switch (room) {
    case 4:
      return strip_sum<4>({x[0], x[1], x[2], x[3]});
    case 8:
      return strip_sum<8>({x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]});
    default:
      return strip_sum<16>(x);
  }
}

// What is known of a band before its codes are drawn. Averages are those of its blocks, by place.
struct Plan {
  std::uint16_t averages[kMaxStrips];
  BandForm form;
  Levels levels;
  Range range;
};

template <typename T>
Plan plan_band(const PoolShape& shape, const Band& band, const T* source) {
  Plan plan = {};
  plan.levels = levels_for(shape.bits, false, false);
  float sums[kMaxStrips] = {};
  float lows[kMaxStrips], highs[kMaxStrips];  // of the blocks
  std::fill(lows, lows + kMaxStrips, INFINITY);
  std::fill(highs, highs + kMaxStrips, -INFINITY);
  for_strips(shape, band, [&](int strip, int place, std::int64_t first, int elements) {
    float x[kMaxStrip] = {};
    for (int j = 0; j < elements; ++j) {
      x[j] = to_float(source[first + j * shape.inner]);
      lows[place] = std::min(lows[place], x[j]);
      highs[place] = std::max(highs[place], x[j]);
    }
    sums[strip] = sum_of(x, shape.room);
  });

  float low = INFINITY, high = -INFINITY, low_residual = INFINITY, high_residual = -INFINITY;
  bool finite = true;
  for (int g = 0; g < band.rows; ++g) {
    for (int k = 0; k < band.columns; ++k) {
      const int place = g * shape.run + k;
      float sum = 0.0f;
      for (int r = 0; r < shape.rows; ++r) sum = sum + sums[(g * shape.rows + r) * shape.run + k];
      plan.averages[place] = average_of(sum, mean_factor(block_elements(shape, band, place)));
      finite = finite && is_finite(sum);
      const float average = bfloat_to_float(plan.averages[place]);
      low = std::min(low, lows[place]);
      high = std::max(high, highs[place]);
      low_residual = std::min(low_residual, lows[place] - average);
      high_residual = std::max(high_residual, highs[place] - average);
    }
  }
  if (shape.bits == 0) return plan;
  plan.range = finite ? band_range(low, high, low_residual, high_residual, plan.levels)
                      : Range{kNanBand, 0.0f, 0.0f};
  plan.form = form_of(plan.range.header, plan.levels);
  return plan;
}

// Writes codes one after the other.
class BitWriter {
 public:
  BitWriter(std::uint32_t* words, std::int64_t count, int bits) : words_(words), bits_(bits) {
    std::fill(words, words + count, 0u);
  }
  void put(std::uint32_t code) {
    words_[at_ / 32] |= code << at_ % 32;
    if (at_ % 32 + bits_ > 32) words_[at_ / 32 + 1] |= code >> (32 - at_ % 32);
    at_ += bits_;
  }

 private:
  std::uint32_t* words_;
  int bits_;
  int at_ = 0;
};

class BitReader {
 public:
  BitReader(const std::uint32_t* words, int bits) : words_(words), bits_(bits) {}
  std::uint32_t get() {
    std::uint32_t code = words_[at_ / 32] >> at_ % 32;
    if (at_ % 32 + bits_ > 32) code |= words_[at_ / 32 + 1] << (32 - at_ % 32);
    at_ += bits_;
    return code & ((1u << bits_) - 1u);
  }

 private:
  const std::uint32_t* words_;
  int bits_;
  int at_ = 0;
};

template <typename T>
void pack_band(const PoolShape& shape, const T* source, MixedKey key, const PoolParts& parts,
               std::int64_t index) {
  const Band band = band_of(shape, index);
  const Plan plan = plan_band(shape, band, source);
  for (int g = 0; g < band.rows; ++g)
    std::copy_n(plan.averages + g * shape.run, band.columns,
                parts.averages + band.first_block(shape) + g * shape.columns);
  if (shape.bits == 0) return;

  parts.headers[index] = plan.range.header;
  BitWriter writer(parts.codes + band.word, band.end_word - band.word, shape.bits);
  if (plan.form == BandForm::kNan) return;
  const std::uint64_t first_draw =
      static_cast<std::uint64_t>(index) * static_cast<std::uint64_t>(shape.slots * shape.draws());
  const std::uint32_t offset = block_offset(key, first_draw);
  const BandDraw draw = band_draw(plan.range.inverse, plan.levels);
  for_strips(shape, band, [&](int strip, int place, std::int64_t first, int elements) {
    const float base = block_base(bfloat_to_float(plan.averages[place]), plan.range.base);
    const float shift = block_shift(base, draw);
    for (int j = 0; j < elements; ++j) {
      const std::uint32_t hash =
          block_hash(offset, key.second,
                     static_cast<std::uint32_t>(first_draw) +
                         static_cast<std::uint32_t>(strip * shape.draws() + j / kRandomBlock));
      const float uniform = unit_interval(hash * element_multiplier(j % kRandomBlock));
      const float value = to_float(source[first + j * shape.inner]);
      writer.put(plan.form == BandForm::kFullRange
                     ? full_range_draw(value, uniform, plan.levels)
                     : static_cast<std::uint32_t>(pool_raised(value, shift, draw, uniform)) - 1u);
    }
  });
}

template <typename T>
void unpack_band(const PoolShape& shape, const PoolParts& parts, T* destination,
                 std::int64_t index) {
  const Band band = band_of(shape, index);
  const auto average_at = [&](int place) {
    return bfloat_to_float(parts.averages[band.first_block(shape) +
                                          place / shape.run * shape.columns + place % shape.run]);
  };
  if (shape.bits == 0) {
    for_strips(shape, band, [&](int, int place, std::int64_t first, int elements) {
      const float average = average_at(place);
      const T element = is_finite(average) ? from_float<T>(average) : nan_element<T>();
      for (int j = 0; j < elements; ++j) destination[first + j * shape.inner] = element;
    });
    return;
  }

  const Levels levels = levels_for(shape.bits, false, false);
  const std::uint32_t header = parts.headers[index];
  const BandForm form = form_of(header, levels);
  const Grid grid = grid_in(header, levels);
  BitReader reader(parts.codes + band.word, shape.bits);
  for_strips(shape, band, [&](int, int place, std::int64_t first, int elements) {
    const float average = average_at(place);
    const bool grid_block = form == BandForm::kGrid && is_finite(average);
    const float base = grid_block ? block_base(average, grid.base) : 0.0f;
    for (int j = 0; j < elements; ++j) {
      const std::uint32_t code = reader.get();
      T& element = destination[first + j * shape.inner];
      if (grid_block) {
        element = from_float<T>(value_of(code, {base, grid.step}));
      } else {
        element = form == BandForm::kFullRange ? from_float<T>(full_range_value(code, levels))
                                               : nan_element<T>();
      }
    }
  });
}

template <typename T>
double band_error(const PoolShape& shape, const T* source, std::int64_t index) {
  const Band band = band_of(shape, index);
  const Plan plan = plan_band(shape, band, source);
  if (shape.bits != 0 && plan.form == BandForm::kNan) return 0.0;
  double error = 0.0;
  for_strips(shape, band, [&](int, int place, std::int64_t first, int elements) {
    const float average = bfloat_to_float(plan.averages[place]);
    if (!is_finite(average)) return;
    const float base = block_base(average, plan.range.base);
    for (int j = 0; j < elements; ++j) {
      const T element = source[first + j * shape.inner];
      if (shape.bits == 0) {
        const double distance = to_double(element) - to_double(from_float<T>(average));
        error += distance * distance;
        continue;
      }
      const bool full = plan.form == BandForm::kFullRange;
      const double step = full ? 2.0 * FLT_MAX / plan.levels.steps
                               : static_cast<double>(float_of(plan.range.header & kStepMask));
      const double position =
          full ? full_range_position(to_float(element), plan.levels)
               : (static_cast<double>(to_float(element)) - base) * plan.range.inverse;
      const double fraction = position - std::floor(position);
      error += step * step * fraction * (1.0 - fraction);
    }
  });
  return error;
}

}  // namespace

void reference_pack_band(const PoolShape& shape, ElementType type, const void* source, MixedKey key,
                         const PoolParts& parts, std::int64_t band) {
  with_element(type, [&]<typename T>() {
    pack_band(shape, static_cast<const T*>(source), key, parts, band);
  });
}

void reference_unpack_band(const PoolShape& shape, ElementType type, const PoolParts& parts,
                           void* destination, std::int64_t band) {
  with_element(
      type, [&]<typename T>() { unpack_band(shape, parts, static_cast<T*>(destination), band); });
}

double reference_band_error(const PoolShape& shape, ElementType type, const void* source,
                            std::int64_t band) {
  return with_element(
      type, [&]<typename T>() { return band_error(shape, static_cast<const T*>(source), band); });
}

}  // namespace backfold::core
