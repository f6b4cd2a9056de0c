// SPDX-License-Identifier: Apache-2.0
//
// Where the blocks, strips and bands of a pooled tensor lie, in the source and in the payload
// (pool.h defines the words). Shared by every backend.

#ifndef BACKFOLD_POOL_GEOMETRY_H_
#define BACKFOLD_POOL_GEOMETRY_H_

#include <cstddef>
#include <cstdint>

#include "backfold/pool.h"
#include "base/checks.h"
#include "base/host_device.h"

namespace backfold::core {

inline constexpr int kMaxStrip = 16;    // elements of a strip
inline constexpr int kMaxStrips = 256;  // of a band

// Strips that a band may have, by the room of one.
BACKFOLD_HD constexpr int strips_for(int room) { return room == 4 ? 256 : 128; }

constexpr std::int64_t parts(std::int64_t size, std::int64_t part) {
  return size / part + (size % part != 0);
}
template <typename Integer>
BACKFOLD_HD constexpr Integer smaller(Integer a, Integer b) {
  return a < b ? a : b;
}

// A valid format, with what follows from it.
struct PoolShape {
  int block = 0;
  int bits = 0;
  std::int64_t outer = 0, depth = 1, height = 1, width = 1, inner = 1;
  std::int64_t deep = 1, high = 1, wide = 1;  // blocks along depth, height and width
  int room = 4;                               // places of a strip: 4, 8 or 16
  int tall = 1;                               // rows of a block along the height
  int rows = 1;                               // strips of a block
  std::int64_t columns = 0;                   // blocks of a block row
  std::int64_t block_rows = 0;
  int group = 1;          // block rows of a band
  int run = 1;            // blocks of a band along a block row
  std::int64_t cuts = 1;  // bands of a block row; 1 where `group` is more
  int slots = 1;          // strips of a whole band
  std::int64_t bands = 0;

  PoolShape() = default;
  explicit PoolShape(const PoolFormat& format)
      : block(format.block),
        bits(format.bits),
        outer(format.outer),
        depth(format.depth),
        height(format.height),
        width(format.width),
        inner(format.inner) {
    for (int i = 0; i < 2 && width == 1; ++i) width = height, height = depth, depth = 1;
    if (height == 1) height = depth, depth = 1;
    deep = parts(depth, block), high = parts(height, block), wide = parts(width, block);
    room = width <= 4 || block <= 4 ? 4 : width <= 8 || block <= 8 ? 8 : 16;
    tall = static_cast<int>(smaller<std::int64_t>(block, height));
    rows = static_cast<int>(smaller<std::int64_t>(block, depth)) * tall;
    columns = wide * inner;
    block_rows = outer * deep * high;
    const int most = strips_for(room);
    if (columns <= most / rows) {
      run = static_cast<int>(columns);
      group = run * rows > most / 2 ? 1 : most / 2 / (run * rows);
      bands = parts(block_rows, group);
    } else {
      run = most / rows;
      cuts = parts(columns, run);
      bands = block_rows * cuts;
    }
    slots = group * rows * run;
  }

  std::int64_t count() const { return outer * depth * height * width * inner; }
  std::int64_t blocks() const { return block_rows * columns; }

  // Blocks of eight random numbers that a strip takes.
  BACKFOLD_HD constexpr int draws() const { return room == 16 ? 2 : 1; }

  // Places in the payload, in bytes.
  std::size_t header_offset() const { return padded(static_cast<std::size_t>(blocks()) * 2); }
  std::size_t code_offset() const {
    return header_offset() + (bits == 0 ? 0 : padded(static_cast<std::size_t>(bands) * 4));
  }
  std::size_t bytes() const {
    if (bits == 0) return header_offset();
    return code_offset() + padded(static_cast<std::size_t>(parts(count() * bits, 32) + bands) * 4);
  }
};

// A block row.
struct BlockRow {
  std::int64_t first;   // its first element in memory
  std::int64_t before;  // elements of the block rows before it
  int depth, height;    // rows of the tensor that it has, along each
};

BACKFOLD_HD BlockRow block_row(const PoolShape& shape, std::int64_t outer, std::int64_t deep,
                               std::int64_t high) {
  const std::int64_t line = shape.width * shape.inner;
  const std::int64_t depth_at = deep * shape.block, height_at = high * shape.block;
  const std::int64_t depth = smaller<std::int64_t>(shape.block, shape.depth - depth_at);
  const std::int64_t height = smaller<std::int64_t>(shape.block, shape.height - height_at);
  const std::int64_t plane = (outer * shape.depth + depth_at) * shape.height;
  return {(plane + height_at) * line, (plane + depth * height_at) * line, static_cast<int>(depth),
          static_cast<int>(height)};
}

inline BlockRow block_row(const PoolShape& shape, std::int64_t index) {
  return block_row(shape, index / (shape.high * shape.deep), index / shape.high % shape.deep,
                   index % shape.high);
}

// A block of a block row, along the row.
struct Column {
  std::int64_t first;   // its first element, counted from the row's
  std::int64_t before;  // elements that one row has in the blocks before it
  int width;            // elements of a strip
};

BACKFOLD_HD Column column(const PoolShape& shape, std::int64_t wide, std::int64_t channel) {
  const std::int64_t at = wide * shape.block;
  const std::int64_t width = smaller<std::int64_t>(shape.block, shape.width - at);
  return {at * shape.inner + channel, at * shape.inner + channel * width, static_cast<int>(width)};
}

inline Column column(const PoolShape& shape, std::int64_t index) {
  return column(shape, index / shape.inner, index % shape.inner);
}

// A band of the tensor.
struct Band {
  std::int64_t index;
  std::int64_t first_row;     // block row
  std::int64_t first_column;  // block of the block row
  int rows, columns;          // block rows, and blocks of each
  std::int64_t word;          // of the codes, where its own start
  std::int64_t end_word;      // and those of the next one

  std::int64_t first_block(const PoolShape& shape) const {
    return first_row * shape.columns + first_column;
  }
};

// Elements before a band; of the whole tensor for the band after the last.
inline std::int64_t elements_before(const PoolShape& shape, std::int64_t band) {
  const std::int64_t row_index = band / shape.cuts * shape.group;
  if (row_index >= shape.block_rows) return shape.count();
  const BlockRow row = block_row(shape, row_index);
  const std::int64_t cut = column(shape, band % shape.cuts * shape.run).before;
  return row.before + row.depth * row.height * (shape.cuts == 1 ? 0 : cut);
}

BACKFOLD_HD constexpr std::int64_t first_word(std::int64_t elements_before, int bits,
                                              std::int64_t band) {
  return (elements_before * bits + 31) / 32 + band;
}

inline Band band_of(const PoolShape& shape, std::int64_t index) {
  const std::int64_t row = index / shape.cuts * shape.group;
  const std::int64_t column = index % shape.cuts * shape.run;
  return {index,
          row,
          column,
          static_cast<int>(smaller<std::int64_t>(shape.group, shape.block_rows - row)),
          static_cast<int>(smaller<std::int64_t>(shape.run, shape.columns - column)),
          first_word(elements_before(shape, index), shape.bits, index),
          first_word(elements_before(shape, index + 1), shape.bits, index + 1)};
}

// Calls visit(strip number, place of its block in the band, its first element in memory, its
// elements) for the strips of a band, in the order of their codes. The place counts `run` blocks to
// a block row.
template <typename Visit>
void for_strips(const PoolShape& shape, const Band& band, const Visit& visit) {
  for (int g = 0; g < band.rows; ++g) {
    const BlockRow row = block_row(shape, band.first_row + g);
    for (int d = 0; d < row.depth; ++d) {
      for (int h = 0; h < row.height; ++h) {
        const std::int64_t line = row.first + (d * shape.height + h) * shape.width * shape.inner;
        for (int k = 0; k < band.columns; ++k) {
          const Column own = column(shape, band.first_column + k);
          visit((g * shape.rows + d * shape.tall + h) * shape.run + k, g * shape.run + k,
                line + own.first, own.width);
        }
      }
    }
  }
}

// Elements of a block of a band, by its place.
inline int block_elements(const PoolShape& shape, const Band& band, int place) {
  const BlockRow row = block_row(shape, band.first_row + place / shape.run);
  return row.depth * row.height * column(shape, band.first_column + place % shape.run).width;
}

}  // namespace backfold::core

#endif  // BACKFOLD_POOL_GEOMETRY_H_
