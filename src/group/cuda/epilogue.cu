// SPDX-License-Identifier: Apache-2.0
//
// Decoding with an epilogue. Kernels are compiled per width and per size of a result, with their
// loops rolled up, and once more without what norms do not need: 64 kernels. Instructions are what
// limits them; memory's latency is hidden by other warps.

#include "group/cuda/epilogue.h"

#include "base/widths.h"
#include "group/cuda/epilogue.cuh"
#include "group/cuda/flat.cuh"
#include "group/cuda/strided.cuh"

namespace backfold::cuda {
namespace {

// The value of a code that is given times 2^place, as a float. Its step is divided by that exactly:
// it has 8 bits and is at least 2^-126, and the place is 16 at most.
__device__ inline float value_of_placed(float code, int place, bool zero_exact,
                                        const core::Grid& grid) {
  const float one = static_cast<float>(1 << place), step = grid.step * (1.0f / one);
  if (!zero_exact) return __fmaf_rn(code, step, grid.base);
  const float value = fmaxf(__fmaf_rn(code - one, step, grid.base), 0x1p-126f);
  return code == 0.0f ? 0.0f : value;
}

// A vector of values, of a packet that may be zero-exact.
template <int kCount, typename ValueAt>
__device__ inline void decode(bool zero_exact, ValueAt value_at, float (&x)[kCount]) {
  if (zero_exact) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) x[j] = value_at(j, true);
  } else {
#pragma unroll
    for (int j = 0; j < kCount; ++j) x[j] = value_at(j, false);
  }
}

template <typename T>
__device__ __noinline__ void finish_special_groups(const EpilogueTask& task, unsigned special) {
  while (special != 0) {
    const std::int64_t group = take_special<T>(special);
    finish_special(task, group, group * kGroup, 1, elements_of(task.packet, group));
  }
}

// Mapping    as unpack_flat_kernel
// Launch     as unpack_flat_kernel
// Alignment  16-byte stores when the destination allows, else by element
// Bytes      headers, codes, mask and product once, destination once; tables from the caches
template <typename T, int kBits, bool kLinear>
__global__ void __launch_bounds__(kFlatThreads, 4)
    finish_flat_kernel(const __grid_constant__ EpilogueTask task) {
  using Shape = FlatShape<T>;
  using Codes = LaneCodes<kBits, Shape::kBlocks>;
  constexpr int kV = Shape::kV;
  const core::Levels levels = core::levels_for(kBits, task.packet.zero_exact, false);
  const LoadedGroup<T, kBits> own(task.packet);
  const int warp_lane = threadIdx.x % 32, first = warp_lane * kV;
  const std::int64_t tile = (own.group - warp_lane / Shape::kLanes) * kGroup;
  // The mask of a tile is kV words for each step. Whole groups have whole words.
  std::uint32_t own_mask = 0;
  if (task.mask != nullptr && warp_lane < 4 * kV &&
      tile + 32 * (warp_lane + 1) <= task.packet.count)
    own_mask = __ldg(reinterpret_cast<const std::uint32_t*>(task.mask) + tile / 32 + warp_lane);

  const Handed packed_rows = handed_of<TableUse::kRestore>(task.packed_rows, tile);
  const Handed rows = handed_of<TableUse::kScale>(task.rows, tile);
  const Handed columns = handed_of<TableUse::kWeigh>(task.columns, tile);

  const core::Grid own_grid = core::grid_in(own.header, levels);
  const bool plain = own.whole && is_plain(own.header, own_grid, levels);
  const unsigned plain_lanes = __ballot_sync(kFullWarp, plain);
  const int quarter = first % kGroup / (kGroup / 4);
  int from = first / kGroup * Shape::kLanes + first % (kGroup / 4) / kV;
  std::int64_t element = tile + first;
#pragma unroll 1
  for (int step = 0; step < 4; ++step, from += 8, element += 32 * kV) {
    static_assert(32 * kV / kGroup * Shape::kLanes == 8);
    const core::Grid grid{__shfl_sync(kFullWarp, own_grid.base, from),
                          __shfl_sync(kFullWarp, own_grid.step, from)};
    Codes codes = own.codes.from_lane(from);
    std::uint32_t keep = 0;
    if (task.mask != nullptr)
      keep = __shfl_sync(kFullWarp, own_mask, kV * step + first / 32) >> first % 32;
    // Other groups are decoded too, to nothing: lanes stay together.
    const int count = (plain_lanes >> from & 1u) != 0 ? kV : 0;
    codes.move_to_first(quarter);
    float x[kV];
    decode(
        task.packet.zero_exact,
        [&](int j, bool zero_exact) {
          return value_of_placed(codes.placed(4 * j, task.magic), Codes::place_of(4 * j),
                                 zero_exact, grid);
        },
        x);
    const int offset = 32 * kV * step + first;
    finish<kLinear>(
        task, element, count, keep,
        [&](float(&y)[kV]) {
          EntryAt at{};
          if (task.packed_rows.lookup != Lookup::kNone)
            change_flat<TableUse::kRestore>(task.packed_rows, packed_rows, element, offset, at, y);
          if (task.rows.lookup != Lookup::kNone)
            change_flat<TableUse::kScale>(task.rows, rows, element, offset, at, y);
          if (task.columns.lookup != Lookup::kNone)
            change_flat<TableUse::kWeigh>(task.columns, columns, element, offset, at, y);
        },
        x);
    store_results<T>(task, element, count, x);
  }
  const unsigned special = own.specials(task.packet, plain);
  if (special != 0) finish_special_groups<T>(task, special);
}

template <typename T>
__device__ __noinline__ void finish_special_columns(const EpilogueTask& task,
                                                    const bool* off_path) {
  const StridedTile<T, kUnpackAcross> tile(task.packet);
  const std::int64_t columns = task.packet.columns;
  for (int column = threadIdx.x / 32; column < tile.columns;
       column += StridedShape<T, kUnpackAcross>::kWarps)
    if (off_path[column])
      finish_special(task, tile.group + column, tile.row * columns + tile.column + column, columns,
                     tile.rows);
}

// Mapping    as unpack_strided_kernel
// Launch     as unpack_strided_kernel
// Alignment  16-byte stores when every row allows, else by element
// Bytes      headers, codes, mask and product once, destination once; tables from the caches
template <typename T, int kBits, bool kLinear>
__global__ void __launch_bounds__(StridedShape<T, kUnpackAcross>::kThreads, 4)
    finish_strided_kernel(const __grid_constant__ EpilogueTask task) {
  using Shape = StridedShape<T, kUnpackAcross>;
  constexpr int kV = Shape::kV, kColumns = Shape::kColumns;
  const GroupTask& packet = task.packet;
  const core::Levels levels = core::levels_for(kBits, packet.zero_exact, false);
  __shared__ TileCodes<kBits, kColumns, kV> tile_codes;
  __shared__ core::Grid grids[kColumns];
  __shared__ bool off_path[kColumns];
  __shared__ StagedEntries packed_rows, rows, columns;

  const StridedTile<T, kUnpackAcross> tile(packet);
  const int first_column = tile.vector * kV;
  const int count = min(kV, tile.columns - first_column);
  const bool fast = tile.rows == kStridedRows;
  const std::int64_t corner = tile.row * packet.columns + tile.column + first_column;
  const auto element_of = [&](int i) { return corner + tile.row_of(i) * packet.columns; };

  const std::uint32_t header =
      threadIdx.x < tile.columns ? packet.headers[tile.group + threadIdx.x] : 0u;
  TileUnits<T, kUnpackAcross, kBits> units;
  if (fast) units.load(packet, tile);
  std::uint64_t keep = 0;
  if (task.mask != nullptr && fast && count > 0) {
    const int asked = task.mask_in_bytes ? 1 : count;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      keep |= static_cast<std::uint64_t>(mask_bits(task, element_of(i), asked) & ((1u << kV) - 1u))
              << kV * i;
  }
  if (fast) {
    const std::int64_t first = tile.row * packet.columns + tile.column;
    packed_rows.fill<TableUse::kRestore>(task.packed_rows, first, packet.columns);
    rows.fill<TableUse::kScale>(task.rows, first, packet.columns);
    columns.fill<TableUse::kWeigh>(task.columns, first, packet.columns);
    units.place(tile, tile_codes);
  }
  bool any_special = false;
  if (threadIdx.x < tile.columns) {
    const core::Grid grid = core::grid_in(header, levels);
    const bool plain = fast && is_plain(header, grid, levels);
    grids[threadIdx.x] = grid;
    off_path[threadIdx.x] = !plain;
    any_special = !plain;
  }
  any_special = __syncthreads_or(any_special);

  if (fast && count > 0) {
    LaneCodes<kBits, 1> codes[kV];
    core::Grid column_grids[kV];
#pragma unroll
    for (int j = 0; j < kV; ++j) {
      codes[j] = tile_codes.get(first_column + j, tile.block);
      column_grids[j] = grids[first_column + j];
    }
#pragma unroll 1
    for (int i = 0; i < 8; ++i, keep >>= kV) {
      float x[kV];
      decode(
          packet.zero_exact,
          [&](int j, bool zero_exact) {
            return value_of_placed(magic_number(codes[j].take() | task.magic), 0, zero_exact,
                                   column_grids[j]);
          },
          x);
      const std::int64_t element = element_of(i);
      finish<kLinear>(
          task, element, count, static_cast<std::uint32_t>(keep),
          [&](float(&y)[kV]) {
            const int row = tile.row_of(i);
            if (task.packed_rows.lookup != Lookup::kNone)
              change_strided<TableUse::kRestore>(task.packed_rows, packed_rows, element, row,
                                                 first_column, y);
            if (task.rows.lookup != Lookup::kNone)
              change_strided<TableUse::kScale>(task.rows, rows, element, row, first_column, y);
            if (task.columns.lookup != Lookup::kNone)
              change_strided<TableUse::kWeigh>(task.columns, columns, element, row, first_column,
                                               y);
          },
          x);
      store_results<T>(task, element, count, x);
    }
  }
  if (!any_special) return;
  __syncthreads();  // the stores above cover these columns too
  finish_special_columns<T>(task, off_path);
}

template <typename T, int kBits, bool kLinear>
Status launch_finish(const GroupFormat& format, EpilogueTask task, cudaStream_t stream) {
  unsigned blocks = 0;
  if (format.layout == Layout::kStrided) {
    using Shape = StridedShape<T, kUnpackAcross>;
    const std::int64_t across = (format.columns + Shape::kColumns - 1) / Shape::kColumns;
    const std::int64_t down = (task.packet.rows + kStridedRows - 1) / kStridedRows;
    BACKFOLD_RETURN_IF_ERROR(blocks_for(across * down, 1, &blocks));
    task.packet.tiles_across = static_cast<unsigned>(across);
    finish_strided_kernel<T, kBits, kLinear><<<blocks, Shape::kThreads, 0, stream>>>(task);
  } else {
    BACKFOLD_RETURN_IF_ERROR(
        blocks_for(task.packet.groups, FlatShape<T>::kGroupsPerThreadBlock, &blocks));
    finish_flat_kernel<T, kBits, kLinear><<<blocks, kFlatThreads, 0, stream>>>(task);
  }
  return check_launch("group kernel with an epilogue");
}

Lookup lookup_for(const GroupFormat& format, const RowAffine& rows, const Table& table,
                  int vector) {
  if (format.layout == Layout::kStrided) {
    if (rows.run % format.columns == 0) return Lookup::kPerRow;
    if (table.period != 0 && format.columns % table.period == 0) return Lookup::kPerColumn;
    return Lookup::kEach;
  }
  if (table.rows.wide) return Lookup::kEach;
  if (rows.run >= shortest_handed_run(vector)) return Lookup::kHanded;
  if (rows.run == 1 && rows.rows % 4 == 0 && is_aligned(rows.scale, 16) &&
      is_aligned(rows.shift, 16))
    return Lookup::kQuads;
  return rows.run >= vector ? Lookup::kTwo : Lookup::kEach;
}

// `before` is the table of the stage before.
Table table_of(const GroupFormat& format, const RowAffine& rows, int vector, const Table& before) {
  Table table{};
  if (rows.scale == nullptr) return table;
  constexpr std::int64_t kLimit = (std::int64_t{1} << 31) - kTableMargin;
  if (rows.run < kLimit / rows.rows) table.period = rows.run * rows.rows;
  table.folds = table.period != 0 && format.count >= kLimit;
  table.rows = row_task(rows, (table.folds ? table.period : format.count) + kTableMargin);
  table.lookup = lookup_for(format, rows, table, vector);
  table.splits = rows.run % vector != 0;
  table.as_before =
      before.lookup == table.lookup && before.rows.run == rows.run && before.rows.rows == rows.rows;
  table.shifts = rows.shift != nullptr;
  return table;
}

}  // namespace

Status unpack_group(const GroupFormat& format, const Epilogue& epilogue, const void* payload,
                    void* destination, void* stream) {
  if (format.count == 0) return {};
  EpilogueTask task{};
  task.packet = group_task(format, payload, destination, epilogue.result_type);
  task.packet.destination = destination;
  const int vector = 16 / static_cast<int>(size_of(epilogue.result_type));
  task.packed_rows = table_of(format, epilogue.packed_rows, vector, {});
  task.rows = table_of(format, epilogue.rows, vector, task.packed_rows);
  task.columns = table_of(format, core::columns_as_rows(epilogue.columns), vector, task.rows);
  task.activation = epilogue.activation;
  task.product = epilogue.product;
  task.product_type = epilogue.product_type;
  task.product_aligned =
      group_task(format, payload, epilogue.product, epilogue.product_type).aligned;
  task.mask = static_cast<const std::uint8_t*>(epilogue.mask.data);
  task.mask_in_bytes = format.columns % vector == 0;
  task.mask_factor = epilogue.mask_factor;
  task.result_type = epilogue.result_type;
  task.raises = core::raises(format);
  task.magic = kMagic;

  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const bool linear =
      !task.raises && task.product == nullptr &&
      (task.activation == Activation::kNone || task.activation == Activation::kRelu);
  return core::with_width<kCodeWidths>(format.bits, [&]<int kBits>() {
    const auto launch = [&]<typename T>() {
      return linear ? launch_finish<T, kBits, true>(format, task, cuda_stream)
                    : launch_finish<T, kBits, false>(format, task, cuda_stream);
    };
    return vector == 8 ? launch.template operator()<BFloat>() : launch.template operator()<float>();
  });
}

}  // namespace backfold::cuda
