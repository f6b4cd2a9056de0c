// SPDX-License-Identifier: Apache-2.0

#include "ranged/reference.h"

#include <cmath>

namespace backfold::core {
namespace {

std::int64_t channel_of(const RangedFormat& format, std::int64_t i) {
  return i / format.inner % format.channels;
}

std::uint8_t* codes_at(const RangedFormat& format, std::uint8_t* codes, std::int64_t first) {
  return codes + first / 8 * format.bits;
}

}  // namespace

bool reference_pack_ranged(const RangedFormat& format, const void* source, const Grid* grids,
                           MixedKey key, std::int64_t first, std::int64_t count,
                           std::uint8_t* codes) {
  const Levels levels = ranged_levels(format.bits);
  bool finite = true;
  with_element(format.type, [&]<typename T>() {
    const T* elements = static_cast<const T*>(source) + first;
    const auto code_at = [&](std::int64_t i) {
      const float value = to_float(elements[i]);
      const Grid& grid = grids[channel_of(format, first + i)];
      finite = finite && is_finite(value);
      return ranged_draw(value, grid, inverse_of(grid.step), uniform_of(key, first + i), levels);
    };
    put_codes(format.bits, count, code_at, codes_at(format, codes, first));
  });
  return finite;
}

void reference_unpack_ranged(const RangedFormat& format, const Grid* grids,
                             const std::uint8_t* codes, std::int64_t first, std::int64_t count,
                             void* destination) {
  const Levels levels = ranged_levels(format.bits);
  with_element(format.type, [&]<typename T>() {
    T* elements = static_cast<T*>(destination);
    for (std::int64_t i = first; i < first + count; ++i) {
      const Grid& grid = grids[channel_of(format, i)];
      const std::uint32_t code = get_code(format.bits, codes, i);
      elements[i] = decodes(grid, levels) ? from_float<T>(value_of(code, grid)) : nan_element<T>();
    }
  });
}

void reference_widen_run(ElementType type, const void* source, std::int64_t count, Bounds* bounds) {
  with_element(type, [&]<typename T>() {
    const T* elements = static_cast<const T*>(source);
    for (std::int64_t i = 0; i < count; ++i) {
      const float value = to_float(elements[i]);
      if (is_finite(value)) *bounds = joined(*bounds, {value, value});
    }
  });
}

void reference_widen_row(ElementType type, const void* source, std::int64_t count, Bounds* bounds) {
  for (std::int64_t i = 0; i < count; ++i)
    reference_widen_run(
        type, static_cast<const char*>(source) + static_cast<std::size_t>(i) * size_of(type), 1,
        bounds + i);
}

void mark_non_finite(const RangedFormat& format, const void* source, Grid* grids) {
  with_element(format.type, [&]<typename T>() {
    const T* elements = static_cast<const T*>(source);
    const std::int64_t count = RangedGeometry(format).count;
    for (std::int64_t i = 0; i < count; ++i)
      if (!is_finite(to_float(elements[i])))
        grids[channel_of(format, i)].step = float_of(0x7fc0'0000u);
  });
}

double reference_channel_error(const RangedFormat& format, const void* source, std::int64_t channel,
                               const Grid& grid) {
  const Levels levels = ranged_levels(format.bits);
  if (!decodes(grid, levels)) return 0.0;
  const double base = grid.base, step = grid.step, top = base + levels.count * step;
  double sum = 0.0;
  bool finite = true;
  with_element(format.type, [&]<typename T>() {
    for (std::int64_t row = 0; row < format.outer; ++row) {
      const T* elements =
          static_cast<const T*>(source) + (row * format.channels + channel) * format.inner;
      for (std::int64_t i = 0; i < format.inner; ++i) {
        const double value = to_float(elements[i]);
        finite = finite && std::isfinite(value);
        if (value <= base || value >= top) {
          const double off = value - (value <= base ? base : top);
          sum += off * off;
        } else {
          const double position = (value - base) / step;
          const double fraction = position - std::floor(position);
          sum += step * step * fraction * (1.0 - fraction);
        }
      }
    }
  });
  return finite ? sum : 0.0;
}

}  // namespace backfold::core
