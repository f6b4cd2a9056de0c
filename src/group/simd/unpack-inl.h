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
#include <cstdint>

#include "base/simd/transpose-inl.h"
#include "group/geometry.h"
#include "group/reference.h"
#include "group/row_affine.h"
#include "group/simd/columns-inl.h"
#include "group/simd/place-inl.h"
#include "group/simd/rotation-inl.h"

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
HWY_BEFORE_NAMESPACE();
namespace backfold::cpu {
namespace HWY_NAMESPACE {

// Destinations at least this large are written past the caches, which could not hold them anyway.
constexpr std::int64_t kStreamBytes = std::int64_t{4} << 20;

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
        stream_(destination != nullptr && format.layout == Layout::kFlat &&
                format.count * static_cast<std::int64_t>(sizeof(T)) >= kStreamBytes &&
                reinterpret_cast<std::uintptr_t>(destination) % 64 == 0) {}

  ~Unpacker() {
    if (stream_) hwy::FlushStream();
  }

  // Restores a group into contiguous elements.
  void unpack(std::int64_t group, T* destination, int count) {
    const std::uint32_t header = run_.headers[group];
    const std::uint8_t* codes = run_.codes + static_cast<std::size_t>(group) * geometry_.code_bytes;
    const core::Grid grid = core::grid_in(header, levels_);
    const bool plain = (header & core::kExponentMask) != core::kExponentMask &&
                       core::kind_in(header) == 0 && core::is_moderate(grid, levels_);
    const bool rotated = format_.layout == Layout::kRotated && (header & core::kExtended) == 0;
    if (!plain || count != format_.group) {
      core::reference_unpack_group(format_, header, codes, destination, 1, count);
      return;
    }
    if (rotated) {
      HWY_ALIGN float values[core::kRotation];
      place_values(format_.bits, codes, format_.group, core::scaled_for_rotation(grid), false,
                   false, values);
      rotate_back(values, destination);
    } else {
      place_values(format_.bits, codes, format_.group, grid, format_.zero_exact, stream_,
                   destination);
    }
  }

 private:
  const GroupFormat& format_;
  core::GroupGeometry geometry_;
  Run run_;
  core::Levels levels_;
  bool stream_;
};

// Calls tile(first group, columns, span of the first) for runs of neighbouring columns that share
// rows.
template <typename Tile>
void for_tiles(const GroupFormat& format, std::int64_t begin, std::int64_t end, Tile tile) {
  while (begin < end) {
    const std::int64_t left = format.columns - begin % format.columns;
    const int columns = static_cast<int>(std::min<std::int64_t>({kTileColumns, left, end - begin}));
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
  HWY_ALIGN float across[kTileRows][kTileColumns];
  HWY_ALIGN float tile[kTileColumns][kTileRows];
  for_tiles(format, begin, end, [&](std::int64_t group, int columns, const core::GroupSpan& span) {
    for (int column = 0; column < columns; ++column)
      unpacker.unpack(group + column, tile[column], span.count);
    transpose(tile[0], kTileRows, columns, span.count, across[0], kTileColumns);
    for (int row = 0; row < span.count; ++row)
      sink(across[row], span.offset + row * span.stride, columns);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace backfold::cpu
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET

#endif  // BACKFOLD_GROUP_SIMD_UNPACK_INL_H_
