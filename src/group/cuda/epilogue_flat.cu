// SPDX-License-Identifier: Apache-2.0
//
// Decoding flat groups with an epilogue. Kernels are compiled per width, size of a result and plan,
// with their loops rolled up: 80 kernels. Instructions limit them, and memory's latency is hidden
// by other warps.

#include "base/widths.h"
#include "group/cuda/epilogue.cuh"
#include "group/cuda/flat.cuh"

namespace backfold::cuda {
namespace {

// Thread blocks that must fit on a multiprocessor.
__host__ __device__ constexpr int finish_flat_blocks(Plan plan) {
  return plan == Plan::kSteps ? 3 : plan == Plan::kAny ? 4 : 5;
}

template <typename T, bool kSteps>
__device__ __noinline__ void finish_special_groups(const EpilogueTask& task, unsigned special) {
  while (special != 0) {
    const std::int64_t group = take_special<T>(special);
    finish_special<kSteps>(task, group, group * kGroup, 1, elements_of(task.packet, group));
  }
}

// Mapping    as unpack_flat_kernel
// Launch     as unpack_flat_kernel
// Alignment  16-byte stores when the destination allows, else by element
// Bytes      headers, codes, mask and tensor once, destination once; tables from the caches
template <typename T, int kBits, Plan kPlan>
__global__ void __launch_bounds__(kFlatThreads, finish_flat_blocks(kPlan))
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

  const auto runs_of = [&](const Table& table) -> const Table& {
    return is_linear(kPlan) ? task.runs : table;
  };
  const Handed packed_rows =
      handed_of<kPlan, TableUse::kRestore>(task.packed_rows, runs_of(task.packed_rows), tile);
  const Handed rows = handed_of<kPlan, TableUse::kScale>(task.rows, runs_of(task.rows), tile);
  const Handed columns =
      handed_of<kPlan, TableUse::kWeigh>(task.columns, runs_of(task.columns), tile);

  const auto place =
      static_cast<unsigned>(tile) - task.runs.rows.by_run.quotient(static_cast<unsigned>(tile)) *
                                        static_cast<unsigned>(task.runs.rows.run);

  const core::Grid own_grid = core::grid_in(own.header, levels);
  const bool plain = own.whole && is_plain(own.header, own_grid, levels);
  const unsigned plain_lanes = __ballot_sync(kFullWarp, plain);
  const unsigned aligned_lanes = task.packet.aligned ? plain_lanes : 0u;
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
    const unsigned offset = 32u * kV * step + first;
    finish<tail_of(kPlan)>(
        task, element, count, keep,
        [&](float(&y)[kV]) {
          EntryAt at{};
          if (is_linear(kPlan)) at = entry_at(task.runs, place + offset);
          change_flat<kPlan, TableUse::kRestore>(task.packed_rows, packed_rows, element, offset, at,
                                                 y);
          change_flat<kPlan, TableUse::kScale>(task.rows, rows, element, offset, at, y);
          change_flat<kPlan, TableUse::kWeigh>(task.columns, columns, element, offset, at, y);
        },
        x);
    store_results<T>(task, element, count, (aligned_lanes >> from & 1u) != 0, x);
  }
  const unsigned special = own.specials(task.packet, plain);
  if (special != 0) finish_special_groups<T, kPlan == Plan::kSteps>(task, special);
}

template <typename T, int kBits>
Status launch(Plan plan, const EpilogueTask& task, cudaStream_t stream) {
  unsigned blocks = 0;
  BACKFOLD_RETURN_IF_ERROR(
      blocks_for(task.packet.groups, FlatShape<T>::kGroupsPerThreadBlock, &blocks));
  switch (plan) {
    case Plan::kNoTables:
      finish_flat_kernel<T, kBits, Plan::kNoTables><<<blocks, kFlatThreads, 0, stream>>>(task);
      break;
    case Plan::kRuns:
      finish_flat_kernel<T, kBits, Plan::kRuns><<<blocks, kFlatThreads, 0, stream>>>(task);
      break;
    case Plan::kRunsAndColumns:
      finish_flat_kernel<T, kBits, Plan::kRunsAndColumns>
          <<<blocks, kFlatThreads, 0, stream>>>(task);
      break;
    case Plan::kSteps:
      finish_flat_kernel<T, kBits, Plan::kSteps><<<blocks, kFlatThreads, 0, stream>>>(task);
      break;
    default:
      finish_flat_kernel<T, kBits, Plan::kAny><<<blocks, kFlatThreads, 0, stream>>>(task);
  }
  return check_launch("group kernel with an epilogue");
}

}  // namespace

Status launch_flat_epilogue(Plan plan, const EpilogueTask& task, cudaStream_t stream) {
  return core::with_width<kCodeWidths>(task.packet.bits, [&]<int kBits>() {
    return size_of(task.result_type) == 2 ? launch<BFloat, kBits>(plan, task, stream)
                                          : launch<float, kBits>(plan, task, stream);
  });
}

}  // namespace backfold::cuda
