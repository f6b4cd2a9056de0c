// SPDX-License-Identifier: Apache-2.0
//
// Decoding strided groups with an epilogue. Kernels are compiled per width, size of a result and
// plan, with their loops rolled up: 64 kernels. Instructions limit them, and memory's latency is
// hidden by other warps.

#include "base/widths.h"
#include "group/cuda/epilogue.cuh"
#include "group/cuda/strided.cuh"

namespace backfold::cuda {
namespace {

template <typename T, bool kSteps>
__device__ __noinline__ void finish_special_columns(const EpilogueTask& task,
                                                    const bool* off_path) {
  const StridedTile<T, kUnpackAcross> tile(task.packet);
  const std::int64_t columns = task.packet.columns;
  for (int column = threadIdx.x / 32; column < tile.columns;
       column += StridedShape<T, kUnpackAcross>::kWarps)
    if (off_path[column])
      finish_special<kSteps>(task, tile.group + column, tile.row * columns + tile.column + column,
                             columns, tile.rows);
}

// Mapping    as unpack_strided_kernel
// Launch     as unpack_strided_kernel
// Alignment  16-byte stores when every row allows, else by element
// Bytes      headers, codes, mask and tensor once, destination once; tables from the caches
template <typename T, int kBits, Plan kPlan>
__global__ void __launch_bounds__(StridedShape<T, kUnpackAcross>::kThreads,
                                  kPlan == Plan::kSteps ? 2 : 4)
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
      keep |=
          static_cast<std::uint64_t>(bits_at(task.mask, element_of(i), asked) & ((1u << kV) - 1u))
          << kV * i;
  }
  if (fast) {
    const std::int64_t first = tile.row * packet.columns + tile.column;
    packed_rows.fill<kPlan, TableUse::kRestore>(task.packed_rows, first, packet.columns);
    rows.fill<kPlan, TableUse::kScale>(task.rows, first, packet.columns);
    columns.fill<kPlan, TableUse::kWeigh>(task.columns, first, packet.columns);
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
      finish<tail_of(kPlan)>(
          task, element, count, static_cast<std::uint32_t>(keep),
          [&](float(&y)[kV]) {
            const int row = tile.row_of(i);
            change_strided<kPlan, TableUse::kRestore>(task.packed_rows, packed_rows, element, row,
                                                      first_column, y);
            change_strided<kPlan, TableUse::kScale>(task.rows, rows, element, row, first_column, y);
            change_strided<kPlan, TableUse::kWeigh>(task.columns, columns, element, row,
                                                    first_column, y);
          },
          x);
      store_results<T>(task, element, count, packet.aligned && count >= kV, x);
    }
  }
  if (!any_special) return;
  __syncthreads();  // the stores above cover these columns too
  finish_special_columns<T, kPlan == Plan::kSteps>(task, off_path);
}

template <typename T, int kBits>
Status launch(Plan plan, EpilogueTask task, cudaStream_t stream) {
  using Shape = StridedShape<T, kUnpackAcross>;
  const std::int64_t across = (task.packet.columns + Shape::kColumns - 1) / Shape::kColumns;
  const std::int64_t down = (task.packet.rows + kStridedRows - 1) / kStridedRows;
  unsigned blocks = 0;
  BACKFOLD_RETURN_IF_ERROR(blocks_for(across * down, 1, &blocks));
  task.packet.tiles_across = static_cast<unsigned>(across);
  switch (plan) {
    case Plan::kNoTables:
      finish_strided_kernel<T, kBits, Plan::kNoTables>
          <<<blocks, Shape::kThreads, 0, stream>>>(task);
      break;
    case Plan::kStaged:
      finish_strided_kernel<T, kBits, Plan::kStaged><<<blocks, Shape::kThreads, 0, stream>>>(task);
      break;
    case Plan::kSteps:
      finish_strided_kernel<T, kBits, Plan::kSteps><<<blocks, Shape::kThreads, 0, stream>>>(task);
      break;
    default:
      finish_strided_kernel<T, kBits, Plan::kAny><<<blocks, Shape::kThreads, 0, stream>>>(task);
  }
  return check_launch("group kernel with an epilogue");
}

}  // namespace

Status launch_strided_epilogue(Plan plan, const EpilogueTask& task, cudaStream_t stream) {
  return core::with_width<kCodeWidths>(task.packet.bits, [&]<int kBits>() {
    return size_of(task.result_type) == 2 ? launch<BFloat, kBits>(plan, task, stream)
                                          : launch<float, kBits>(plan, task, stream);
  });
}

}  // namespace backfold::cuda
