// SPDX-License-Identifier: Apache-2.0
//
// Restores groups one by one, and walks over those of a tensor, for the SIMD target being compiled.

#if defined(BACKFOLD_GROUP_SIMD_UNPACK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BACKFOLD_GROUP_SIMD_UNPACK_INL_H_
#undef BACKFOLD_GROUP_SIMD_UNPACK_INL_H_
#else
#define BACKFOLD_GROUP_SIMD_UNPACK_INL_H_
#endif

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "base/arithmetic.h"
#include "base/caches.h"
#include "group/geometry.h"
#include "group/reference.h"
#include "group/row_affine.h"
#include "group/simd/columns-inl.h"
#include "group/simd/place-inl.h"
#include "group/simd/place_columns-inl.h"
#include "group/simd/place_rotated-inl.h"

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
HWY_BEFORE_NAMESPACE();
namespace backfold::cpu {
namespace HWY_NAMESPACE {

// Where the headers and codes of group 0 are, and what it draws as.
struct Run {
  std::uint32_t* headers;
  std::uint8_t* codes;
  std::int64_t first_group;
};

// The groups of a payload.
inline Run run_of(const GroupFormat& format, const void* payload) {
  auto* const bytes = static_cast<std::uint8_t*>(const_cast<void*>(payload));
  return {reinterpret_cast<std::uint32_t*>(bytes), bytes + core::GroupGeometry(format).header_bytes,
          0};
}

template <typename T>
class Unpacker {
 public:
  // A null destination stands for memory that is read again at once.
  Unpacker(const GroupFormat& format, const Run& run, const void* destination)
      : format_(format),
        geometry_(format),
        run_(run),
        levels_(core::levels_for(format.bits, format.zero_exact, false)),
        stream_(destination != nullptr && is_large(format) &&
                reinterpret_cast<std::uintptr_t>(destination) % 64 == 0) {}

  ~Unpacker() {
    if (stream_) hwy::FlushStream();
  }

  // Restores a group into contiguous elements.
  void unpack(std::int64_t group, T* destination, int count) {
    const std::uint32_t header = run_.headers[group];
    const std::uint8_t* codes = codes_of(group);
    if (is_constant(header)) {
      const T element = core::from_double<T>(constant_of(group));
      if (count == format_.group)
        fill_group(element, format_.group, stream_, destination);
      else
        std::fill_n(destination, count, element);
      return;
    }
    const core::Grid grid = core::grid_in(header, levels_);
    const bool rotated = format_.layout == Layout::kRotated && (header & core::kExtended) == 0;
    if (!is_plain(header, grid) || count != format_.group) {
      core::reference_unpack_group(format_, header, codes, destination, 1, count);
      return;
    }
    if (rotated) {
      place_rotated(format_.bits, codes, core::scaled_for_rotation(grid), stream_, destination);
    } else {
      place_values(format_.bits, codes, format_.group, grid, format_.zero_exact, stream_,
                   destination);
    }
  }

  // Restores neighbouring columns of `count` rows, `stride` apart; at most kSpanColumns.
  void unpack_tile(std::int64_t group, int columns, int count, T* destination,
                   std::int64_t stride) {
    Columns found = {};
    const int whole =
        sizeof(T) < 8 && count == kTileRows ? columns / kLineColumns<T> * kLineColumns<T> : 0;
    for (int i = 0; i < columns; ++i)
      find_column(group + i, i, i < whole ? column_place<T>(i, whole) : i, found);
    // Stores of less than half a line would reach memory one by one.
    constexpr bool kWide = hn::MaxLanes(DF()) * sizeof(float) >= 32;
    const bool lines = kWide && stream_ && whole != 0 &&
                       stride * static_cast<std::int64_t>(sizeof(T)) % 64 == 0 &&
                       reinterpret_cast<std::uintptr_t>(destination) % 64 == 0;
    if constexpr (sizeof(T) < 8) {
      if (whole != 0)
        place_columns(format_, codes_of(group), whole, whole, found.grids,
                      core::smallest_positive<T>(), lines, destination, stride);
    }
    place_part(group, whole, columns, count, found, destination, stride);
    if (found.others.none()) return;
    if (lines) hwy::FlushStream();
    for (int i = 0; i < columns; ++i)
      if (found.others[i])
        core::reference_unpack_group(format_, run_.headers[group + i], codes_of(group + i),
                                     destination + i, stride, count);
  }

 private:
  // Rows of a strided tensor, written through the caches, push each other out at half the size.
  static bool is_large(const GroupFormat& format) {
    const std::int64_t bytes = format.count * static_cast<std::int64_t>(sizeof(T));
    return (format.layout == Layout::kStrided ? 2 * bytes : bytes) >= core::streamed_bytes();
  }

  bool is_plain(std::uint32_t header, const core::Grid& grid) const {
    return (header & core::kExponentMask) != core::kExponentMask &&
           core::kind_in(header) == core::kFinite && core::is_moderate(grid, levels_);
  }

  static bool is_constant(std::uint32_t header) {
    constexpr std::uint32_t kForm = core::kExponentMask | core::kExtended | core::kFullRange;
    return (header & kForm) == core::kExponentMask;
  }

  double constant_of(std::int64_t group) const {
    double value;
    std::memcpy(&value, codes_of(group), sizeof(value));
    return value;
  }

  const std::uint8_t* codes_of(std::int64_t group) const {
    return run_.codes + static_cast<std::size_t>(group) * geometry_.code_bytes;
  }

  // Columns of a tile: their grids, and those that have none. fp64 constants are written over what
  // their grids give, the others are left to the reference.
  struct Columns {
    ColumnGrids grids;
    ColumnSet others;
    ColumnSet constant;
    T constants[sizeof(T) == 8 ? kSpanColumns : 1];
  };

  // Columns from number `first` on pass through tiles of fp32 values: those of a tile that is not
  // whole, and fp64 elements.
  void place_part(std::int64_t group, int first, int columns, int count, const Columns& found,
                  T* destination, std::int64_t stride) const {
    Tile tile;
    for (; first < columns; first += kTileColumns) {
      const int part = std::min(kTileColumns, columns - first);
      ColumnGrids grids = {};
      std::copy_n(found.grids.base + first, part, grids.base);
      std::copy_n(found.grids.step + first, part, grids.step);
      grids.fixed = found.grids.fixed >> first;
      grids.positive = found.grids.positive >> first;
      place_columns(format_, codes_of(group + first), part, kTileColumns, grids,
                    core::smallest_positive<T>(), false, tile.rows[0], kTileColumns);
      for (int row = 0; row < count; ++row) {
        T* const to = destination + row * stride;
        std::transform(tile.rows[row], tile.rows[row] + part, to + first,
                       [](float value) { return core::from_float<T>(value); });
        if constexpr (sizeof(T) == 8) {
          for (int i = first; found.constant.any() && i < first + part; ++i)
            if (found.constant[i]) to[i] = found.constants[i];
        }
      }
    }
  }

  // Takes up column `i` of a tile, whose grid belongs at `place`.
  void find_column(std::int64_t group, int i, int place, Columns& found) const {
    const std::uint32_t header = run_.headers[group];
    const core::Grid grid = core::grid_in(header, levels_);
    if (is_plain(header, grid)) {
      found.grids.base[place] = grid.base;
      found.grids.step[place] = grid.step;
      return;
    }
    if (!is_constant(header)) {
      found.others.set(i);
      return;
    }
    const double value = constant_of(group);
    if constexpr (sizeof(T) == 8) {
      found.constant.set(i);
      found.constants[i] = value;
      return;
    }
    // A grid without steps, unless that would lose the sign of a zero or, where code 0 is zero,
    // what is not positive.
    const auto number = static_cast<float>(value);
    const bool zero = number == 0.0f && !std::signbit(number);
    const float least = format_.zero_exact ? core::smallest_positive<T>() : -core::kHuge;
    if (!zero && (number == 0.0f || !(number >= least && number <= core::kHuge))) {
      found.others.set(i);
      return;
    }
    found.grids.base[place] = number;
    if (!format_.zero_exact) return;
    found.grids.fixed.set(i);
    found.grids.positive[i] = !zero;
  }

  const GroupFormat& format_;
  core::GroupGeometry geometry_;
  Run run_;
  core::Levels levels_;
  bool stream_;
};

// Calls tile(first group, columns, span of the first) for runs of neighbouring columns that share
// rows.
template <typename Work>
void for_tiles(const GroupFormat& format, int most_columns, std::int64_t begin, std::int64_t end,
               Work tile) {
  while (begin < end) {
    const std::int64_t left = format.columns - begin % format.columns;
    const int columns = static_cast<int>(std::min<std::int64_t>({most_columns, left, end - begin}));
    tile(begin, columns, core::span_of(format, begin));
    begin += columns;
  }
}

// Decodes groups [begin, end), of 128 elements, as fp32 values. Calls sink(values, element, count)
// for stretches of neighbours, number `element` the first; the values may be written, and there is
// room for whole vectors.
template <typename Sink>
void for_values(const GroupFormat& format, const Run& run, std::int64_t begin, std::int64_t end,
                Sink sink) {
  const GroupFormat of_values = core::format_of_values(format);
  Unpacker<float> unpacker(of_values, run, nullptr);
  if (format.layout != Layout::kStrided) {
    HWY_ALIGN float values[128];
    for (std::int64_t group = begin; group < end; ++group) {
      const core::GroupSpan span = core::span_of(format, group);
      unpacker.unpack(group, values, span.count);
      sink(values, span.offset, span.count);
    }
    return;
  }
  Tile tile;
  const auto restore = [&](std::int64_t group, int columns, const core::GroupSpan& span) {
    unpacker.unpack_tile(group, columns, span.count, tile.rows[0], kTileColumns);
    for (int row = 0; row < span.count; ++row)
      sink(tile.rows[row], span.offset + row * span.stride, columns);
  };
  for_tiles(format, kTileColumns, begin, end, restore);
}

}  // namespace HWY_NAMESPACE
}  // namespace backfold::cpu
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET

#endif  // BACKFOLD_GROUP_SIMD_UNPACK_INL_H_
