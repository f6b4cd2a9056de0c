// SPDX-License-Identifier: Apache-2.0
//
// The tables of an epilogue: rows and columns, by which values are scaled and shifted.
//
// Entries are found once per tile wherever runs allow: in flat groups lane l of a warp holds that
// of the tile's l-th run and hands it round, in strided ones a thread block has those of the tile's
// rows or columns in shared memory. What an entry does is written out in each branch, as values
// that branches share are moved to common registers.

#ifndef BACKFOLD_GROUP_CUDA_TABLES_CUH_
#define BACKFOLD_GROUP_CUDA_TABLES_CUH_

#include <cstdint>

#include "base/cuda/magic.cuh"
#include "group/cuda/codes.cuh"
#include "group/cuda/rows.cuh"
#include "group/cuda/steps.cuh"

namespace backfold::cuda {

// How the entries of a vector's elements are found.
enum class Lookup {
  kNone,       // there is no such stage
  kHanded,     // flat: the lanes hold them
  kTwo,        // flat: runs are at least a vector; packed rows are found one by one
  kQuads,      // flat: runs of 1, and entries are whole and aligned float4s
  kPerRow,     // strided: one for all of a row's elements
  kPerColumn,  // strided: the same in every row
  kEach        // one by one
};

// What kernels are compiled for: which lookups a stage may have.
enum class Plan {
  kAny,
  kNoTables,
  kRuns,            // flat: runs only, in all stages
  kRunsAndColumns,  // flat: and quads in the last
  kStaged,          // strided: rows and columns
  kSteps            // any, before a program that is taken step by step
};
// Plans in which entries may have to be found one by one.
__host__ __device__ constexpr bool has_any_table(Plan plan) {
  return plan == Plan::kAny || plan == Plan::kSteps;
}

struct Table {
  RowTask rows;
  std::int64_t period;  // of the elements, after which entries are the same
  Lookup lookup;
  bool folds;      // elements are not all below 2^31, and are taken modulo `period`
  bool splits;     // vectors may lie in two runs
  bool as_before;  // entries are where those of the stage before are
  bool shifts;
};

// Elements past the last that a tile asks for, at most.
inline constexpr std::int64_t kTableMargin = 1 << 14;

// Runs of at least this many elements: no tile of a warp has elements of more than 31.
__host__ __device__ constexpr int shortest_handed_run(int vector) {
  return (4 * 32 * vector + 29) / 30;
}

// What is done with a table's entries: the stages, in their order.
enum class TableUse { kRestore, kScale, kWeigh };

__host__ __device__ constexpr unsigned bit_of(Lookup lookup) {
  return 1u << static_cast<int>(lookup);
}
__host__ __device__ constexpr unsigned lookups_of(Plan plan, TableUse use) {
  const unsigned none = bit_of(Lookup::kNone);
  switch (plan) {
    case Plan::kNoTables:
      return none;
    case Plan::kRunsAndColumns:
      if (use == TableUse::kWeigh) return bit_of(Lookup::kQuads);
      [[fallthrough]];
    case Plan::kRuns:
      return none | bit_of(Lookup::kHanded);
    case Plan::kStaged:
      return none | bit_of(Lookup::kPerRow) | bit_of(Lookup::kPerColumn);
    default:
      return ~0u;
  }
}
// Plans for norms: no activation but relu, elements below 2^31.
__host__ __device__ constexpr bool is_linear(Plan plan) {
  return !has_any_table(plan) && plan != Plan::kNoTables;
}

template <Plan kPlan, TableUse kUse>
__device__ inline bool looks_up(const Table& table, Lookup lookup) {
  constexpr unsigned kLookups = lookups_of(kPlan, kUse);
  if ((kLookups & bit_of(lookup)) == 0) return false;
  return kLookups == bit_of(lookup) || table.lookup == lookup;
}

template <TableUse kUse>
__device__ inline Affine prepared(Affine by) {
  return kUse == TableUse::kRestore ? Affine{by.shift, __frcp_rn(by.scale)} : by;
}
template <TableUse kUse>
__device__ inline float changed(float x, Affine by) {
  return kUse == TableUse::kScale ? (x - by.shift) * by.scale : x * by.scale + by.shift;
}

__device__ __noinline__ inline std::int64_t remainder_of(std::int64_t element,
                                                         std::int64_t period) {
  return element % period;
}
__device__ inline std::int64_t folded(const Table& table, std::int64_t element) {
  return table.folds ? remainder_of(element, table.period) : element;
}
__device__ inline Affine entry_in(const Table& table, unsigned row) {
  return {table.shifts ? __ldg(table.rows.shift + row) : 0.0f, __ldg(table.rows.scale + row)};
}

// Out of line: for what no other lookup serves, and elements off the fast path.
template <TableUse kUse, int kCount>
__device__ __noinline__ void change_out_of_line(const Table& table, std::int64_t element,
                                                Values<kCount>& values) {
#pragma unroll 1
  for (int j = 0; j < kCount; ++j) {
    const Affine by = affine_at(table.rows, folded(table, element + j));
    values.x[j] = changed<kUse>(values.x[j], prepared<kUse>(by));
  }
}
template <TableUse kUse, int kCount>
__device__ inline void change_each(const Table& table, std::int64_t element, float (&x)[kCount]) {
  if (table.lookup == Lookup::kNone) return;
  Values<kCount> values;
#pragma unroll
  for (int j = 0; j < kCount; ++j) values.x[j] = x[j];
  change_out_of_line<kUse>(table, element, values);
#pragma unroll
  for (int j = 0; j < kCount; ++j) x[j] = values.x[j];
}

// What a lane of a flat tile holds of a table.
struct Handed {
  Affine own;      // of the lane's run, counted from the one that the tile begins in
  unsigned place;  // of the tile's first element in its run
};
// `runs` has the runs of the table.
template <Plan kPlan, TableUse kUse>
__device__ inline Handed handed_of(const Table& table, const Table& runs, std::int64_t tile) {
  if (!looks_up<kPlan, kUse>(table, Lookup::kHanded)) return {};
  const auto number = static_cast<unsigned>(is_linear(kPlan) ? tile : folded(table, tile));
  const unsigned run = runs.rows.by_run.quotient(number);
  const unsigned row = runs.rows.by_rows.remainder(run + threadIdx.x % 32);
  return {prepared<kUse>(entry_in(table, row)),
          number - run * static_cast<unsigned>(runs.rows.run)};
}

// An entry's number, in the table or among the lanes, and how many elements of its run are left.
struct EntryAt {
  unsigned entry, left;
};

// Among the lanes, for an element so far from where the tile's first run begins.
__device__ inline EntryAt entry_at(const Table& runs, unsigned place) {
  const unsigned run = runs.rows.by_run.quotient(place);
  return {run, (run + 1) * static_cast<unsigned>(runs.rows.run) - place};
}

// A stage for neighbours in a flat tile, number `element` the first, `offset` from the tile's
// first. By whole warps. `at` is where the stage before looked, and then where this one did;
// norms have all their runs in common, and it is theirs.
template <Plan kPlan, TableUse kUse, int kCount>
__device__ inline void change_flat(const Table& table, const Handed& handed, std::int64_t element,
                                   unsigned offset, EntryAt& at, float (&x)[kCount]) {
  if (looks_up<kPlan, kUse>(table, Lookup::kNone)) return;
  const RowTask& rows = table.rows;
  const auto run_length = static_cast<unsigned>(rows.run),
             entries = static_cast<unsigned>(rows.rows);
  if (looks_up<kPlan, kUse>(table, Lookup::kHanded)) {
    if (!is_linear(kPlan) && !table.as_before) at = entry_at(table, handed.place + offset);
    const auto from_lane = [&](unsigned lane) -> Affine {
      return {__shfl_sync(kFullWarp, handed.own.shift, static_cast<int>(lane)),
              __shfl_sync(kFullWarp, handed.own.scale, static_cast<int>(lane))};
    };
    const Affine own = from_lane(at.entry);
    if (!table.splits) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) x[j] = changed<kUse>(x[j], own);
    } else {
      const Affine next = from_lane(at.entry + 1);
#pragma unroll
      for (int j = 0; j < kCount; ++j) x[j] = changed<kUse>(x[j], j < at.left ? own : next);
    }
  } else if (looks_up<kPlan, kUse>(table, Lookup::kQuads)) {
    if (!table.as_before)
      at.entry = rows.by_rows.remainder(
          static_cast<unsigned>(is_linear(kPlan) ? element : folded(table, element)));
    unsigned entry = at.entry;
#pragma unroll
    for (int quad = 0; quad < kCount; quad += 4) {
      const float4 scale = __ldg(reinterpret_cast<const float4*>(rows.scale + entry));
      float4 shift{};
      if (table.shifts) shift = __ldg(reinterpret_cast<const float4*>(rows.shift + entry));
      x[quad] = changed<kUse>(x[quad], prepared<kUse>({shift.x, scale.x}));
      x[quad + 1] = changed<kUse>(x[quad + 1], prepared<kUse>({shift.y, scale.y}));
      x[quad + 2] = changed<kUse>(x[quad + 2], prepared<kUse>({shift.z, scale.z}));
      x[quad + 3] = changed<kUse>(x[quad + 3], prepared<kUse>({shift.w, scale.w}));
      entry = entry + 4 == entries ? 0 : entry + 4;
    }
  } else if (kUse != TableUse::kRestore && looks_up<kPlan, kUse>(table, Lookup::kTwo)) {
    if (!table.as_before) {
      const auto number = static_cast<unsigned>(folded(table, element));
      const unsigned run = rows.by_run.quotient(number);
      at = {rows.by_rows.remainder(run), (run + 1) * run_length - number};
    }
    const Affine own = prepared<kUse>(entry_in(table, at.entry));
    const Affine next = prepared<kUse>(entry_in(table, at.entry + 1 == entries ? 0 : at.entry + 1));
#pragma unroll
    for (int j = 0; j < kCount; ++j) x[j] = changed<kUse>(x[j], j < at.left ? own : next);
  } else if constexpr (has_any_table(kPlan)) {
    change_each<kUse>(table, element, x);
  }
}

// The entries of a strided tile's rows or columns, in shared memory. To be filled by one thread for
// each; the tile's first element is number `element`.
struct StagedEntries {
  alignas(16) Affine by[128];

  template <Plan kPlan, TableUse kUse>
  __device__ void fill(const Table& table, std::int64_t element, std::int64_t row_elements) {
    if (threadIdx.x >= 128) return;
    if (looks_up<kPlan, kUse>(table, Lookup::kPerRow))
      element += threadIdx.x * row_elements;
    else if (looks_up<kPlan, kUse>(table, Lookup::kPerColumn))
      element += threadIdx.x;
    else
      return;
    by[threadIdx.x] = prepared<kUse>(affine_at(table.rows, folded(table, element)));
  }
};

// A stage for neighbours in a strided tile, number `element` the first.
template <Plan kPlan, TableUse kUse, int kCount>
__device__ inline void change_strided(const Table& table, const StagedEntries& staged,
                                      std::int64_t element, int row, int column,
                                      float (&x)[kCount]) {
  if (looks_up<kPlan, kUse>(table, Lookup::kNone)) return;
  if (looks_up<kPlan, kUse>(table, Lookup::kPerRow)) {
    const Affine by = staged.by[row];
#pragma unroll
    for (int j = 0; j < kCount; ++j) x[j] = changed<kUse>(x[j], by);
  } else if (looks_up<kPlan, kUse>(table, Lookup::kPerColumn)) {
#pragma unroll
    for (int j = 0; j < kCount; j += 2) {
      const float4 two = *reinterpret_cast<const float4*>(&staged.by[column + j]);
      x[j] = changed<kUse>(x[j], {two.x, two.y});
      x[j + 1] = changed<kUse>(x[j + 1], {two.z, two.w});
    }
  } else if constexpr (has_any_table(kPlan)) {
    change_each<kUse>(table, element, x);
  }
}

}  // namespace backfold::cuda

#endif  // BACKFOLD_GROUP_CUDA_TABLES_CUH_
