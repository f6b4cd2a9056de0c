// SPDX-License-Identifier: Apache-2.0

#include "pool/cuda/pool.h"

#include <algorithm>
#include <bit>
#include <cinttypes>
#include <limits>

#include "pool/cuda/launch.h"

namespace backfold::cuda {
namespace {

// Shared memory for a warp's bands, if it has several: most of what there is when blocks of four
// warps fill a multiprocessor's registers.
constexpr int kMaxBands = 10 * 1024;

// What may be read after the last strip, and is not used.
constexpr int kBeyond = core::kMaxStrip * 8;

// How many lanes a band has, and what each of them takes.
void divide_among_lanes(PoolTask* task) {
  PoolTask& t = *task;
  const int blocks = t.group * t.run;
  const int band_bytes =
      t.slots * t.block * static_cast<int>(size_of(t.type)) + (t.bits == 0 ? 0 : blocks * 20);
  t.lanes_log = 0;  // the more bands a warp has, the less it spends on each
  while (t.lanes_log < 5 && band_bytes << (5 - t.lanes_log) > kMaxBands) ++t.lanes_log;
  t.lanes = 1 << t.lanes_log;
  const auto parts_of = [&](int rows) {
    return t.rows / t.tall * static_cast<int>(core::parts(t.tall, rows));
  };
  t.part_rows = t.tall;
  if (blocks * t.rows / t.tall <= t.lanes)
    while (t.part_rows > 1 && blocks * parts_of(t.part_rows - 1) <= t.lanes) --t.part_rows;
  t.tall_parts = static_cast<int>(core::parts(t.tall, t.part_rows));
  t.parts = parts_of(t.part_rows);
  t.items = blocks * t.parts;
  t.by_parts = Divider(t.parts), t.by_tall_parts = Divider(t.tall_parts);
}

// What a warp has in shared memory, and how its elements get there.
Staging lay_out_memory(PoolTask* task) {
  PoolTask& t = *task;
  const auto size = static_cast<int>(size_of(t.type));
  const int bands = 32 >> t.lanes_log, vector = 16 / size;
  const auto padded = [](int bytes) { return (bytes + 15) / 16 * 16; };
  const int band_words = (t.slots * t.block * t.bits + 31) / 32 + 2;
  t.average_offset = padded(t.parts == 1 ? 0 : bands * t.slots * 4);
  t.part_offset = t.average_offset + padded(t.parts == 1 ? 0 : bands * t.group * t.run * 4);
  t.base_offset = t.part_offset + (t.bits == 0 ? 0 : bands * t.items * 16);
  t.word_offset = t.base_offset + padded(t.bits == 0 ? 0 : bands * t.items * 4);
  t.stage_offset = t.word_offset + (t.bits == 0 ? 0 : padded(bands * band_words * 4) + 16);

  // Elements of a warp's bands lie together if they are whole rows of one plane after the other.
  // Wide strips and elements have no kernels that would ask for more (pool_launch.h).
  const bool aligned = is_aligned(t.elements, 16) && size != 8 && t.room != 16;
  if (t.inner == 1 && t.depth == 1 && t.cuts == 1) {
    t.warp_bytes = t.stage_offset + padded(bands * t.slots * t.block * size) + 16 + kBeyond;
    t.staged_row = t.line;
    t.pairs = t.width % 2 == 0 && (t.block % 2 == 0 || t.columns == 1) &&
              is_aligned(t.elements, 2 * static_cast<std::size_t>(size));
    const bool vectors = t.whole && aligned && static_cast<std::int64_t>(t.line) * size % 16 == 0;
    return vectors ? Staging::kVectors : Staging::kFlat;
  }
  t.staged_row = t.room * t.run;
  // Lanes of several bands meet different banks.
  t.band_room = t.slots * t.room + (bands == 1 ? 0 : std::max(t.lanes, vector));
  t.warp_bytes = t.stage_offset + padded(bands * t.band_room * size);
  const int chunks = t.run / vector;
  if (t.depth != 1 || t.group != 1 || !aligned || t.inner % vector != 0 || t.run % vector != 0 ||
      chunks > t.lanes || !std::has_single_bit(static_cast<unsigned>(chunks)))
    return Staging::kElements;
  t.chunks_log = std::countr_zero(static_cast<unsigned>(chunks));
  return t.whole && t.run == square_run(t.room) ? Staging::kSquares : Staging::kChannels;
}

Status make_task(const core::PoolShape& shape, ElementType type, const void* elements,
                 void* payload, PoolTask* task, Staging* staging) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max() - 1'024;
  const std::int64_t line = shape.width * shape.inner;
  const std::int64_t rows = shape.outer * shape.depth * shape.height;
  if (line > kMost || rows > kMost || shape.bands > kMost)
    return Status::error(StatusCode::kInvalidArgument,
                         "width * inner, outer * depth * height and bands must be at most %" PRId64
                         " on a GPU, got %" PRId64 ", %" PRId64 " and %" PRId64,
                         kMost, line, rows, shape.bands);
  const auto number = [](std::int64_t value) { return static_cast<int>(value); };
  char* const bytes = static_cast<char*>(payload);
  PoolTask& t = *task;
  t.block = shape.block, t.bits = shape.bits, t.room = shape.room, t.tall = shape.tall;
  t.rows = shape.rows, t.group = shape.group, t.run = shape.run, t.slots = shape.slots;
  t.draws = shape.draws();
  t.depth = number(shape.depth), t.height = number(shape.height), t.width = number(shape.width);
  t.inner = number(shape.inner), t.line = number(line);
  t.high = number(shape.high), t.deep = number(shape.deep), t.cuts = number(shape.cuts);
  t.columns = number(shape.columns), t.block_rows = number(shape.block_rows);
  t.tensor_rows = number(rows), t.bands = number(shape.bands);
  t.by_run = Divider(shape.run), t.by_inner = Divider(shape.inner);
  t.by_high = Divider(shape.high), t.by_deep = Divider(shape.deep);
  t.by_cuts = Divider(shape.cuts);
  t.whole = shape.width % shape.block == 0 && shape.block == shape.room;
  t.type = type;
  t.levels = core::levels_for(shape.bits, false, false);
  t.elements = const_cast<void*>(elements);
  t.averages = reinterpret_cast<std::uint16_t*>(bytes);
  t.headers = reinterpret_cast<std::uint32_t*>(bytes + shape.header_offset());
  t.codes = reinterpret_cast<std::uint32_t*>(bytes + shape.code_offset());
  t.average_room = static_cast<std::int64_t>(shape.header_offset() / 2);
  t.header_room = static_cast<std::int64_t>((shape.code_offset() - shape.header_offset()) / 4);
  t.code_room = static_cast<std::int64_t>((shape.bytes() - shape.code_offset()) / 4);

  const int piece_bits = piece_of(shape.room) * shape.bits;
  t.bytewise = t.whole && piece_bits % 8 == 0 && piece_bits != 24;
  for (int i = 0; i < 4; ++i) {
    t.places[i] = 1u << i * shape.bits;
    t.magic_debt -= kMagic * t.places[i];
  }
  t.fifth_place = std::uint64_t{1} << 4 * shape.bits;
  t.factor = core::mean_factor(shape.rows * shape.block);
  divide_among_lanes(task);
  *staging = lay_out_memory(task);
  return {};
}

}  // namespace

Status pack_pool(const core::PoolShape& shape, ElementType type, const void* source,
                 core::MixedKey key, void* payload, void* stream) {
  if (shape.bands == 0) return {};
  PoolTask task{};
  Staging staging{};
  if (Status made = make_task(shape, type, source, payload, &task, &staging); !made.ok())
    return made;
  task.key = key;
  return launch_pool_pack(task, staging, static_cast<cudaStream_t>(stream));
}

Status unpack_pool(const core::PoolShape& shape, ElementType type, const void* payload,
                   void* destination, void* stream) {
  if (shape.bands == 0) return {};
  PoolTask task{};
  Staging staging{};
  if (Status made =
          make_task(shape, type, destination, const_cast<void*>(payload), &task, &staging);
      !made.ok())
    return made;
  return launch_pool_unpack(task, staging, static_cast<cudaStream_t>(stream));
}

}  // namespace backfold::cuda
