// SPDX-License-Identifier: Apache-2.0

#include "cuda/pool.h"

#include <cinttypes>
#include <limits>

#include "cuda/launch.h"
#include "cuda/pool_tile.cuh"

namespace backfold::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;

// Shared memory of a warp that elements may be staged in: six blocks then fit a multiprocessor.
constexpr int kMaxStage = 8 * 1024;

// Thread blocks that must fit on a multiprocessor: as many as leave registers for the strips of a
// lane, 32 elements of 4 or 8 strips, or 64 of 4.
constexpr int resident_blocks(int room, bool residual) {
  return room == 16 ? 4 : room == 4 ? 5 : residual ? 6 : 8;
}

// The code of an element beyond 2^124, or of one beside it. Out of line: it takes fp64.
__device__ __noinline__ std::uint32_t draw_full_range(float value, float uniform,
                                                      const core::Levels& levels) {
  return core::full_range_draw(value, uniform, levels);
}

// Codes of up to eight elements, `bits` of them, into the words of a band.
__device__ inline void put_codes(std::uint32_t* words, int at, std::uint64_t codes) {
  const int shift = at % 32;
  words += at / 32;
  const std::uint64_t low = codes << shift;
  const auto first = static_cast<std::uint32_t>(low);
  const auto second = static_cast<std::uint32_t>(low >> 32);
  const auto third = shift == 0 ? 0u : static_cast<std::uint32_t>(codes >> 32 >> (32 - shift));
  if (first != 0) atomicOr(words, first);
  if (second != 0) atomicOr(words + 1, second);
  if (third != 0) atomicOr(words + 2, third);
}

// `bits` bits from bit `at` of the words; reads none that holds nothing of them.
__device__ inline std::uint64_t get_codes(const std::uint32_t* words, int at, int bits) {
  const int shift = at % 32;
  words += at / 32;
  std::uint64_t codes = words[0];
  if (shift + bits > 32) codes |= static_cast<std::uint64_t>(words[1]) << 32;
  codes >>= shift;
  if (shift + bits > 64) codes |= static_cast<std::uint64_t>(words[2]) << (64 - shift);
  return codes;
}

// Zero bytes up to a multiple of 16 after the averages and the headers. The first warp's task.
__device__ inline void zero_padding(const PoolTask& task, int lane) {
  const std::int64_t averages = static_cast<std::int64_t>(task.block_rows) * task.columns + lane;
  if (averages < task.average_room) task.averages[averages] = 0;
  if (task.bits != 0 && task.bands + lane < task.header_room) task.headers[task.bands + lane] = 0;
}

// Stores the codes of a strip or of half of one, kCount of them, that make whole bytes.
template <int kCount>
__device__ inline void store_codes(std::uint8_t* bytes, int bits, std::uint64_t codes) {
  switch (kCount * bits) {
    case 8:
      *bytes = static_cast<std::uint8_t>(codes);
      break;
    case 16:
      *reinterpret_cast<std::uint16_t*>(bytes) = static_cast<std::uint16_t>(codes);
      break;
    case 64:
      reinterpret_cast<std::uint32_t*>(bytes)[1] = static_cast<std::uint32_t>(codes >> 32);
      [[fallthrough]];
    default:
      *reinterpret_cast<std::uint32_t*>(bytes) = static_cast<std::uint32_t>(codes);
  }
}

template <int kCount>
__device__ inline std::uint64_t load_codes(const std::uint8_t* bytes, int bits) {
  switch (kCount * bits) {
    case 8:
      return *bytes;
    case 16:
      return *reinterpret_cast<const std::uint16_t*>(bytes);
    case 64:
      return reinterpret_cast<const std::uint32_t*>(bytes)[0] |
             static_cast<std::uint64_t>(reinterpret_cast<const std::uint32_t*>(bytes)[1]) << 32;
    default:
      return *reinterpret_cast<const std::uint32_t*>(bytes);
  }
}

// Mapping    a warp packs up to 128 strips (256 of up to 4 elements) of neighbouring bands, 4 (8)
//            per lane, in registers; strips of a block meet in shared memory
// Launch     blocks of 128, a grid as large as the work
// Alignment  loads of up to 16 bytes straight to registers for kJoined and kChannels; kStaged
//            copies 16 bytes at a time, at any alignment; kScattered goes by element
// Bytes      source once, averages, headers and codes once
template <int kRoom, Walk kWalk, bool kResidual>
__global__ void __launch_bounds__(kThreads, resident_blocks(kRoom, kResidual))
    pack_pool_kernel(const __grid_constant__ PoolTask task) {
  constexpr int kStrips = core::strips_for(kRoom), kOwn = kStrips / 32;
  extern __shared__ uint4 shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int bands_of_warp = 32 >> task.lanes_log;
  const int own_band = lane >> task.lanes_log, own_lane = lane & (task.lanes - 1);
  char* const room = reinterpret_cast<char*>(shared) + warp * task.warp_bytes;
  float* const sums = reinterpret_cast<float*>(room);
  float* const averages = sums + kStrips;

  const int tile = static_cast<int>(blockIdx.x) * kWarps + warp;
  if (tile == 0) zero_padding(task, lane);
  const std::int64_t first_band = static_cast<std::int64_t>(tile) * bands_of_warp;
  if (first_band >= task.bands) return;
  const int band_index =
      static_cast<int>(min(first_band + own_band, static_cast<std::int64_t>(task.bands)));
  const BandPlace band = place_band<kWalk>(task, band_index);
  const bool there = band_index < task.bands;
  const std::int64_t end = there ? place_band<kWalk>(task, band_index + 1).before : band.before;
  const auto elements = static_cast<int>(end - band.before);

  Strip strips[kOwn];
  place_strips<kWalk, kRoom>(task, band, elements, own_lane, strips);
  float x[kOwn][kRoom];
  with_type(task.type, [&](auto element) {
    using T = decltype(element);
    if constexpr (kWalk == Walk::kStaged) {
      const std::int64_t tile_begin = __shfl_sync(kAllLanes, band.before, 0);
      const Stage stage(task, room + task.stage_offset, sizeof(T), tile_begin,
                        __shfl_sync(kAllLanes, end, 31));
      stage_in<T>(stage);
      load_strips<kWalk>(reinterpret_cast<const T*>(stage.shared), task, strips, tile_begin, x);
    } else {
      load_strips<kWalk>(static_cast<const T*>(task.elements), task, strips, 0, x);
    }
  });

  // The words of its codes; in shared memory unless they are stored as they are drawn.
  std::uint32_t* const words =
      reinterpret_cast<std::uint32_t*>(averages + kStrips) + own_band * task.band_words;
  int words_of_band = 0;
  std::uint32_t* codes_of_band = nullptr;
  if constexpr (kResidual) {
    const std::int64_t first_word = core::first_word(band.before, task.bits, band_index);
    codes_of_band = task.codes + first_word;
    if (there)
      words_of_band =
          static_cast<int>(core::first_word(end, task.bits, band_index + 1) - first_word);
    if (!task.direct)
      for (int i = own_lane; i < words_of_band; i += task.lanes) words[i] = 0;
  }

  bool finite = true;
  const int places = task.group * task.run;
#pragma unroll
  for (int s = 0; s < kOwn; ++s) {
    const int index = strip_index<kWalk, kOwn>(task, own_lane, s);
    const float sum = core::strip_sum<kRoom>(x[s]);
    finite = finite && core::is_finite(sum);
    if (index < task.slots) sums[own_band * task.slots + index] = sum;
    if (strips[s].in_block != 0)
      averages[own_band * places + strips[s].place] =
          static_cast<float>(strips[s].in_block);  // the elements of its block, for now
  }
  __syncwarp();
  for (int place = own_lane; place < places; place += task.lanes) {
    const int g = task.group == 1 ? 0 : task.by_run.divide(place), k = place - g * task.run;
    if (!there || band.first_row + g >= task.block_rows || band.first_column + k >= task.columns)
      continue;
    const float* of_block = sums + own_band * task.slots + g * task.rows * task.run + k;
    float sum = 0.0f;
    for (int r = 0; r < task.rows; ++r) sum = sum + of_block[r * task.run];
    float& average = averages[own_band * places + place];
    const std::uint16_t rounded =
        core::average_of(sum, core::mean_factor(static_cast<int>(average)));
    task.averages[block_index(task, band, g, k)] = rounded;
    average = core::bfloat_to_float(rounded);
  }
  if constexpr (!kResidual) return;
  __syncwarp();

  // The range of the band.
  const float infinity = __int_as_float(0x7f80'0000);
  float low = infinity, high = -infinity;
  bool huge = false;
  float base[kOwn];
#pragma unroll
  for (int s = 0; s < kOwn; ++s) {
    base[s] = 0.0f;
    if (strips[s].elements == 0) continue;
    float least = x[s][0], most = x[s][0];
    if (task.whole) {
#pragma unroll
      for (int j = 1; j < kRoom; ++j) {
        least = fminf(least, x[s][j]);
        most = fmaxf(most, x[s][j]);
      }
    } else {
#pragma unroll
      for (int j = 1; j < kRoom; ++j) {
        least = fminf(least, j < strips[s].elements ? x[s][j] : least);
        most = fmaxf(most, j < strips[s].elements ? x[s][j] : most);
      }
    }
    huge = huge || least < -core::kPoolHuge || most > core::kPoolHuge;
    base[s] = averages[own_band * places + strips[s].place];
    low = fminf(low, least - base[s]);
    high = fmaxf(high, most - base[s]);
  }
  int flags = (huge ? 1 : 0) | (finite ? 0 : 2);
  for (int distance = 1; distance < task.lanes; distance *= 2) {
    low = fminf(low, __shfl_xor_sync(kAllLanes, low, distance));
    high = fmaxf(high, __shfl_xor_sync(kAllLanes, high, distance));
    flags |= __shfl_xor_sync(kAllLanes, flags, distance);
  }
  const float beyond = (flags & 1) != 0 ? infinity : 0.0f;
  const core::Range range = (flags & 2) != 0
                                ? core::Range{core::kNanBand, 0.0f, 0.0f}
                                : core::band_range(-beyond, beyond, low, high, task.levels);
  if (there && own_lane == 0) task.headers[band_index] = range.header;

  // Its codes.
  const std::uint64_t first_draw =
      static_cast<std::uint64_t>(band_index) * static_cast<std::uint64_t>(task.slots * task.draws);
  const std::uint32_t offset = core::block_offset(task.key, first_draw);
  // Adding 2^23 - 1 downward leaves a code in the low bits; what stands above is taken off of four
  // codes at once.
  const std::uint32_t places_of_codes[4] = {1u, 1u << task.bits, 1u << 2 * task.bits,
                                            1u << 3 * task.bits};
  const std::uint32_t magic_debt = 0u - 0x4b00'0000u * (places_of_codes[0] + places_of_codes[1] +
                                                        places_of_codes[2] + places_of_codes[3]);
#pragma unroll
  for (int s = 0; s < kOwn; ++s) {
    if (strips[s].elements == 0 || (flags & 2) != 0) continue;
    const std::uint32_t draw_block =
        static_cast<std::uint32_t>(first_draw) +
        static_cast<std::uint32_t>(strip_index<kWalk, kOwn>(task, own_lane, s) * task.draws);
    const float from = core::block_base(base[s], range.base);
    constexpr int kPiece = kRoom < 8 ? kRoom : 8;
#pragma unroll
    for (int first = 0; first < kRoom; first += kPiece) {
      const std::uint32_t hash = core::block_hash(
          offset, task.key.second, draw_block + static_cast<std::uint32_t>(first / 8));
      std::uint32_t quads[2] = {magic_debt, magic_debt};
      if ((flags & 1) == 0) {
#pragma unroll
        for (int j = 0; j < kPiece; ++j) {
          const float uniform = core::unit_interval(hash * core::element_multiplier(j));
          const float raised =
              core::pool_raised(x[s][first + j], from, range.inverse, uniform, task.levels);
          quads[j / 4] += __float_as_uint(__fadd_rd(raised, 8388607.0f)) * places_of_codes[j % 4];
        }
      } else {
        quads[0] = quads[1] = 0;
#pragma unroll
        for (int j = 0; j < kPiece; ++j) {
          const float uniform = core::unit_interval(hash * core::element_multiplier(j));
          quads[j / 4] +=
              draw_full_range(x[s][first + j], uniform, task.levels) * places_of_codes[j % 4];
        }
      }
      if constexpr (kPiece == 4) quads[1] = 0;
      const std::uint64_t codes = quads[0] | static_cast<std::uint64_t>(quads[1]) << 4 * task.bits;
      const int at = (strips[s].position + first) * task.bits;
      if (task.direct) {
        store_codes<kPiece>(reinterpret_cast<std::uint8_t*>(codes_of_band) + at / 8, task.bits,
                            codes);
        continue;
      }
      const int left = strips[s].elements - first;
      const std::uint64_t mask = left >= kPiece
                                     ? ~std::uint64_t{0}
                                     : (std::uint64_t{1} << (left <= 0 ? 0 : left * task.bits)) - 1;
      put_codes(words, at, codes & mask);
    }
  }

  if (!task.direct) __syncwarp();
  if (task.direct && (flags & 2) == 0) {
    std::uint8_t* const bytes = reinterpret_cast<std::uint8_t*>(codes_of_band);
    for (int i = elements * task.bits / 8 + own_lane; i < 4 * words_of_band; i += task.lanes)
      bytes[i] = 0;
  } else {
    for (int i = own_lane; i < words_of_band; i += task.lanes)
      codes_of_band[i] = task.direct ? 0 : words[i];
  }
  if (band_index == task.bands - 1 &&
      codes_of_band + words_of_band + own_lane < task.codes + task.code_room)
    codes_of_band[words_of_band + own_lane] = 0;
}

// What a strip decodes to off the fast path. Out of line, to keep it out of the kernel's way.
template <typename T>
__device__ __noinline__ void put_unusual(T* to, const PoolTask& task, int elements,
                                         std::uint64_t codes, core::BandForm form, float average,
                                         const core::Grid& grid) {
  const float base = core::block_base(average, grid.base);
  for (int j = 0; j < elements; ++j) {
    const auto code = static_cast<std::uint32_t>(codes >> j * task.bits) & ((1u << task.bits) - 1u);
    T element = core::nan_element<T>();
    if (form == core::BandForm::kFullRange) {
      element = core::from_float<T>(core::full_range_value(code, task.levels));
    } else if (form == core::BandForm::kGrid && core::is_finite(average)) {
      element = core::from_float<T>(
          task.bits == 0 ? average : core::value_of(code, core::Grid{base, grid.step}));
    }
    to[static_cast<std::int64_t>(j) * task.inner] = element;
  }
}

// Mapping    as packing; a lane reads the codes of its strips
// Launch     as packing
// Alignment  as packing
// Bytes      averages, headers and codes once, destination once
template <int kRoom, Walk kWalk, bool kResidual>
__global__ void __launch_bounds__(kThreads, resident_blocks(kRoom, kResidual))
    unpack_pool_kernel(const __grid_constant__ PoolTask task) {
  constexpr int kOwn = core::strips_for(kRoom) / 32;
  constexpr int kPiece = kRoom < 8 ? kRoom : 8;
  extern __shared__ uint4 shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int own_lane = lane & (task.lanes - 1);
  const int tile = static_cast<int>(blockIdx.x) * kWarps + warp;
  const std::int64_t first_band = static_cast<std::int64_t>(tile) * (32 >> task.lanes_log);
  if (first_band >= task.bands) return;
  const int band_index = static_cast<int>(
      min(first_band + (lane >> task.lanes_log), static_cast<std::int64_t>(task.bands)));
  const BandPlace band = place_band<kWalk>(task, band_index);
  const bool there = band_index < task.bands;
  const std::int64_t end = there ? place_band<kWalk>(task, band_index + 1).before : band.before;
  Strip strips[kOwn];
  place_strips<kWalk, kRoom>(task, band, static_cast<int>(end - band.before), own_lane, strips);

  std::uint32_t header = 0;
  const std::uint32_t* words = nullptr;
  if constexpr (kResidual) {
    if (there) header = task.headers[band_index];
    words = task.codes + core::first_word(band.before, task.bits, band_index);
  }
  const core::BandForm form = core::form_of(header, task.levels);
  const core::Grid grid = core::grid_in(header, task.levels);
  const std::uint32_t mask = (1u << task.bits) - 1u;

  // What the strips hold: codes, and what they start from.
  std::uint64_t codes[kOwn][kRoom / kPiece];
  float averages[kOwn];
#pragma unroll
  for (int s = 0; s < kOwn; ++s) {
    averages[s] = 0.0f;
    const int g = task.group == 1 ? 0 : task.by_run.divide(strips[s].place);
    if (strips[s].elements != 0)
      averages[s] = core::bfloat_to_float(
          task.averages[block_index(task, band, g, strips[s].place - g * task.run)]);
#pragma unroll
    for (int first = 0; first < kRoom; first += kPiece) {
      std::uint64_t& piece = codes[s][first / kPiece];
      piece = 0;
      if constexpr (kResidual) {
        const int left = min(kPiece, strips[s].elements - first);
        const int at = (strips[s].position + first) * task.bits;
        if (left > 0)
          piece = task.direct
                      ? load_codes<kPiece>(reinterpret_cast<const std::uint8_t*>(words) + at / 8,
                                           task.bits)
                      : get_codes(words, at, left * task.bits);
      }
    }
  }

  with_type(task.type, [&](auto element) {
    using T = decltype(element);
    const std::int64_t origin = kWalk == Walk::kStaged ? __shfl_sync(kAllLanes, band.before, 0) : 0;
    const std::int64_t tile_end = kWalk == Walk::kStaged ? __shfl_sync(kAllLanes, end, 31) : 0;
    const Stage stage(task, reinterpret_cast<char*>(shared) + warp * task.warp_bytes, sizeof(T),
                      origin, tile_end);
    T* const destination = kWalk == Walk::kStaged ? reinterpret_cast<T*>(stage.shared)
                                                  : static_cast<T*>(task.elements);
    T values[kOwn][kRoom];
    bool plain = true;  // all of them
#pragma unroll
    for (int s = 0; s < kOwn; ++s) {
      const float base = kResidual ? core::block_base(averages[s], grid.base) : averages[s];
      plain = plain && (!kResidual || form == core::BandForm::kGrid) &&
              core::is_moderate_block(base, grid.step, task.levels);
#pragma unroll
      for (int j = 0; j < kRoom; ++j) {
        float value = base;
        if constexpr (kResidual) {
          // Under the bits of 2^23 a code is a number without a conversion.
          const std::uint64_t piece = codes[s][j / kPiece];
          const auto quad =
              static_cast<std::uint32_t>(j % kPiece < 4 ? piece : piece >> 4 * task.bits);
          const std::uint32_t code = quad >> (j % 4) * task.bits & mask;
          value = core::fused(__uint_as_float(code | 0x4b00'0000u) - 8388608.0f, grid.step, base);
        }
        put_number(value, values[s][j]);
      }
    }
    if (plain) {
      store_strips<kWalk>(values, task, strips, origin, destination);
    } else {
#pragma unroll
      for (int s = 0; s < kOwn; ++s)
#pragma unroll
        for (int first = 0; first < kRoom; first += kPiece)
          put_unusual(destination + (strips[s].first - origin) +
                          static_cast<std::int64_t>(first) * task.inner,
                      task, min(kPiece, strips[s].elements - first), codes[s][first / kPiece], form,
                      averages[s], grid);
    }
    if constexpr (kWalk == Walk::kStaged) stage_out<T>(stage);
  });
}

Status make_task(const core::PoolShape& shape, ElementType type, const void* elements,
                 void* payload, PoolTask* task, Walk* walk) {
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
  const std::size_t size = size_of(type);
  const int strips = core::strips_for(shape.room);
  const int bands = 2 * shape.slots <= strips ? 2 : 1;  // of a warp

  PoolTask& t = *task;
  t.block = shape.block, t.bits = shape.bits, t.room = shape.room, t.tall = shape.tall;
  t.rows = shape.rows, t.group = shape.group, t.run = shape.run, t.slots = shape.slots;
  t.draws = shape.draws();
  t.depth = number(shape.depth), t.height = number(shape.height), t.width = number(shape.width);
  t.inner = number(shape.inner), t.line = number(line);
  t.high = number(shape.high), t.deep = number(shape.deep), t.cuts = number(shape.cuts);
  t.columns = number(shape.columns), t.block_rows = number(shape.block_rows);
  t.tensor_rows = number(rows), t.bands = number(shape.bands);
  t.by_run = Divider(shape.run), t.by_rows = Divider(shape.rows), t.by_tall = Divider(shape.tall);
  t.by_inner = Divider(shape.inner), t.by_high = Divider(shape.high);
  t.by_deep = Divider(shape.deep), t.by_cuts = Divider(shape.cuts);
  t.lanes = 32 / bands, t.lanes_log = bands == 1 ? 5 : 4;
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

  const int piece_bits = (shape.room < 8 ? 4 : 8) * shape.bits;
  t.direct = t.whole && piece_bits % 8 == 0 && piece_bits != 24;

  // Elements of a warp's bands lie together if they are whole rows of one plane after the other.
  const bool together = shape.inner == 1 && shape.depth == 1 && shape.cuts == 1;
  const bool aligned = is_aligned(elements, 16);
  const auto stage = static_cast<int>(static_cast<std::size_t>(bands * shape.slots) *
                                          static_cast<std::size_t>(shape.block) * size +
                                      32);
  if (together && t.whole && aligned && static_cast<std::size_t>(line) * size % 16 == 0 &&
      (shape.group == 1 || shape.height % shape.block == 0)) {
    *walk = Walk::kJoined;
  } else if (aligned && shape.inner > 1 && shape.inner % (strips / 32) == 0 &&
             shape.run % (strips / 32) == 0) {
    *walk = Walk::kChannels;
  } else {
    *walk = together && stage <= kMaxStage + 32 ? Walk::kStaged : Walk::kScattered;
  }
  t.band_words =
      shape.bits == 0 || t.direct ? 0 : (shape.slots * shape.block * shape.bits + 31) / 32 + 1;
  t.stage_offset = 8 * strips + (bands * t.band_words * 4 + 15) / 16 * 16;
  t.warp_bytes = (*walk == Walk::kStaged ? stage : 0) / 16 * 16;
  return {};
}

template <typename Launch>
Status launch(const PoolTask& task, Walk walk, const Launch& kernel_for) {
  unsigned blocks = 0;
  const std::int64_t per_block = kWarps * (32 / task.lanes);
  if (const Status fits = blocks_for(task.bands, per_block, &blocks); !fits.ok()) return fits;
  const auto by_residual = [&]<int kRoom, Walk kWalk>() {
    if (task.bits != 0) return kernel_for.template operator()<kRoom, kWalk, true>(blocks);
    return kernel_for.template operator()<kRoom, kWalk, false>(blocks);
  };
  const auto by_walk = [&]<int kRoom>() {
    switch (walk) {
      case Walk::kJoined:
        return by_residual.template operator()<kRoom, Walk::kJoined>();
      case Walk::kChannels:
        return by_residual.template operator()<kRoom, Walk::kChannels>();
      case Walk::kStaged:
        return by_residual.template operator()<kRoom, Walk::kStaged>();
      case Walk::kScattered:
        return by_residual.template operator()<kRoom, Walk::kScattered>();
    }
  };
  if (task.room == 4) by_walk.template operator()<4>();
  if (task.room == 8) by_walk.template operator()<8>();
  if (task.room == 16) by_walk.template operator()<16>();
  return check_launch("pool kernel");
}

}  // namespace

Status pack_pool(const core::PoolShape& shape, ElementType type, const void* source,
                 core::MixedKey key, void* payload, void* stream) {
  if (shape.bands == 0) return {};
  PoolTask task;
  Walk walk{};
  if (Status made = make_task(shape, type, source, payload, &task, &walk); !made.ok()) return made;
  task.key = key;
  task.warp_bytes += task.stage_offset;
  const auto queue = static_cast<cudaStream_t>(stream);
  return launch(task, walk, [&]<int kRoom, Walk kWalk, bool kResidual>(unsigned blocks) {
    pack_pool_kernel<kRoom, kWalk, kResidual>
        <<<blocks, kThreads, static_cast<std::size_t>(kWarps * task.warp_bytes), queue>>>(task);
  });
}

Status unpack_pool(const core::PoolShape& shape, ElementType type, const void* payload,
                   void* destination, void* stream) {
  if (shape.bands == 0) return {};
  PoolTask task;
  Walk walk{};
  if (Status made = make_task(shape, type, destination, const_cast<void*>(payload), &task, &walk);
      !made.ok())
    return made;
  const auto queue = static_cast<cudaStream_t>(stream);
  return launch(task, walk, [&]<int kRoom, Walk kWalk, bool kResidual>(unsigned blocks) {
    unpack_pool_kernel<kRoom, kWalk, kResidual>
        <<<blocks, kThreads, static_cast<std::size_t>(kWarps * task.warp_bytes), queue>>>(task);
  });
}

}  // namespace backfold::cuda
