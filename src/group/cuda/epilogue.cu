// SPDX-License-Identifier: Apache-2.0
//
// Decoding with an epilogue. Kernels are compiled per width and per size of a result, with their
// loops rolled up: 32 kernels. Memory's latency is hidden by other warps.

#include "group/cuda/epilogue.h"

#include "base/widths.h"
#include "group/cuda/epilogue.cuh"
#include "group/cuda/flat.cuh"
#include "group/cuda/strided.cuh"

namespace backfold::cuda {
namespace {

// A vector of values, of a packet that may be zero-exact.
template <int kCount, typename CodeAt, typename GridAt>
__device__ inline void decode(bool zero_exact, CodeAt code_at, GridAt grid_at, float (&x)[kCount]) {
  if (zero_exact) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) x[j] = value_of_element<float, true>(code_at(j), grid_at(j));
  } else {
#pragma unroll
    for (int j = 0; j < kCount; ++j) x[j] = value_of_element<float, false>(code_at(j), grid_at(j));
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
template <typename T, int kBits>
__global__ void __launch_bounds__(kFlatThreads, 4)
    finish_flat_kernel(const __grid_constant__ EpilogueTask task) {
  using Shape = FlatShape<T>;
  constexpr int kV = Shape::kV;
  const core::Levels levels = core::levels_for(kBits, task.packet.zero_exact, false);
  const LoadedGroup<T, kBits> own(task.packet);
  const int warp_lane = threadIdx.x % 32;
  const std::int64_t first_group = own.group - warp_lane / Shape::kLanes;
  const std::int64_t first_element = first_group * kGroup + warp_lane * kV;
  std::uint32_t keep = 0;  // of all four vectors, so that the loads go out together
  if (task.mask != nullptr) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const std::int64_t element = first_element + 32 * kV * step;
      if (element < task.packet.count)
        keep |= (mask_bits(task, element, 1) & ((1u << kV) - 1u)) << kV * step;
    }
  }

  const core::Grid own_grid = core::grid_in(own.header, levels);
  const bool plain = own.whole && is_plain(own.header, own_grid, levels);
  const unsigned plain_lanes = __ballot_sync(kFullWarp, plain);
#pragma unroll 1
  for (int step = 0; step < 4; ++step, keep >>= kV) {
    const int first = (32 * step + warp_lane) * kV;  // element of the tile
    const int quarter = first % kGroup / (kGroup / 4);
    const int from = first / kGroup * Shape::kLanes + first % (kGroup / 4) / kV;
    const core::Grid grid{__shfl_sync(kFullWarp, own_grid.base, from),
                          __shfl_sync(kFullWarp, own_grid.step, from)};
    const LaneCodes<kBits, Shape::kBlocks> codes = own.codes.from_lane(from);
    if ((plain_lanes >> first / kGroup * Shape::kLanes & 1u) == 0) continue;
    float x[kV];
    decode(
        task.packet.zero_exact, [&](int j) { return codes.get(4 * j, quarter); },
        [&](int) { return grid; }, x);
    const std::int64_t element = first_element + 32 * kV * step;
    finish(task, element, kV, keep, x);
    store_results<T>(task, element, kV, x);
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
template <typename T, int kBits>
__global__ void __launch_bounds__(StridedShape<T, kUnpackAcross>::kThreads, 3)
    finish_strided_kernel(const __grid_constant__ EpilogueTask task) {
  using Shape = StridedShape<T, kUnpackAcross>;
  constexpr int kV = Shape::kV, kColumns = Shape::kColumns;
  const GroupTask& packet = task.packet;
  const core::Levels levels = core::levels_for(kBits, packet.zero_exact, false);
  __shared__ TileCodes<kBits, kColumns, kV> tile_codes;
  __shared__ core::Grid grids[kColumns];
  __shared__ bool off_path[kColumns];

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
#pragma unroll
    for (int i = 0; i < 8; ++i)
      keep |= static_cast<std::uint64_t>(mask_bits(task, element_of(i), count) & ((1u << kV) - 1u))
              << kV * i;
  }
  if (fast) units.place(tile, tile_codes);
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
          packet.zero_exact, [&](int j) { return codes[j].take(); },
          [&](int j) { return column_grids[j]; }, x);
      finish(task, element_of(i), count, static_cast<std::uint32_t>(keep), x);
      store_results<T>(task, element_of(i), count, x);
    }
  }
  if (!any_special) return;
  __syncthreads();  // the stores above cover these columns too
  finish_special_columns<T>(task, off_path);
}

template <typename T, int kBits>
Status launch_finish(const GroupFormat& format, EpilogueTask task, cudaStream_t stream) {
  unsigned blocks = 0;
  if (format.layout == Layout::kStrided) {
    using Shape = StridedShape<T, kUnpackAcross>;
    const std::int64_t across = (format.columns + Shape::kColumns - 1) / Shape::kColumns;
    const std::int64_t down = (task.packet.rows + kStridedRows - 1) / kStridedRows;
    BACKFOLD_RETURN_IF_ERROR(blocks_for(across * down, 1, &blocks));
    task.packet.tiles_across = static_cast<unsigned>(across);
    finish_strided_kernel<T, kBits><<<blocks, Shape::kThreads, 0, stream>>>(task);
  } else {
    BACKFOLD_RETURN_IF_ERROR(
        blocks_for(task.packet.groups, FlatShape<T>::kGroupsPerThreadBlock, &blocks));
    finish_flat_kernel<T, kBits><<<blocks, kFlatThreads, 0, stream>>>(task);
  }
  return check_launch("group kernel with an epilogue");
}

void add_table(const GroupFormat& format, const RowAffine& rows, TableUse use, EpilogueTask& task) {
  if (rows.scale == nullptr) return;
  const bool whole_quads = format.layout != Layout::kStrided || format.columns % 4 == 0;
  const bool quads = rows.run == 1 && rows.rows % 4 == 0 && whole_quads &&
                     is_aligned(rows.scale, 16) && is_aligned(rows.shift, 16);
  // A vector at the end of a row asks for a few elements past the last.
  task.tables[task.table_count++] = {row_task(rows, format.count + 8), use, quads};
}

}  // namespace

Status unpack_group(const GroupFormat& format, const Epilogue& epilogue, const void* payload,
                    void* destination, void* stream) {
  if (format.count == 0) return {};
  EpilogueTask task{};
  task.packet = group_task(format, payload, destination, epilogue.result_type);
  task.packet.destination = destination;
  add_table(format, epilogue.packed_rows, TableUse::kRestore, task);
  add_table(format, epilogue.rows, TableUse::kScale, task);
  add_table(format, core::columns_as_rows(epilogue.columns), TableUse::kWeigh, task);
  task.activation = epilogue.activation;
  task.product = epilogue.product;
  task.product_type = epilogue.product_type;
  task.product_aligned =
      group_task(format, payload, epilogue.product, epilogue.product_type).aligned;
  task.mask = static_cast<const std::uint8_t*>(epilogue.mask.data);
  task.mask_factor = epilogue.mask_factor;
  task.result_type = epilogue.result_type;
  task.raises = core::raises(format);

  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  return core::with_width<kCodeWidths>(format.bits, [&]<int kBits>() {
    return size_of(epilogue.result_type) == 2
               ? launch_finish<BFloat, kBits>(format, task, cuda_stream)
               : launch_finish<float, kBits>(format, task, cuda_stream);
  });
}

}  // namespace backfold::cuda
