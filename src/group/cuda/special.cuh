// SPDX-License-Identifier: Apache-2.0
//
// Groups off the fast path, one warp each: constants, non-finite elements, huge values, a short
// last group. Lane l holds elements l, l + 32, ... of the group, whatever its layout.

#ifndef BACKFOLD_GROUP_CUDA_SPECIAL_CUH_
#define BACKFOLD_GROUP_CUDA_SPECIAL_CUH_

#include <type_traits>

#include "base/arithmetic.h"
#include "group/cuda/range.cuh"
#include "group/cuda/task.cuh"
#include "group/geometry.h"

namespace backfold::cuda {

inline constexpr int kMaxPerLane = 8;  // of a group of 256

__device__ inline int warp_sum(int value) { return __reduce_add_sync(kFullWarp, value); }

__device__ inline float warp_max(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, distance));
  return value;
}

__device__ inline std::int64_t warp_sum(std::int64_t value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    value += __shfl_xor_sync(kFullWarp, static_cast<long long>(value), distance);
  return value;
}

// H x over the 128 elements of a warp, four per lane.
__device__ inline void warp_hadamard(float* values, int lane) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const float sign = (lane & distance) != 0 ? -1.0f : 1.0f;
#pragma unroll
    for (int k = 0; k < 4; ++k)
      values[k] = __fmaf_rn(values[k], sign, __shfl_xor_sync(kFullWarp, values[k], distance));
  }
#pragma unroll
  for (int stride = 1; stride < 4; stride *= 2) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if ((k & stride) != 0) continue;
      const float a = values[k], b = values[k + stride];
      values[k] = a + b;
      values[k + stride] = a - b;
    }
  }
}

__device__ inline float flip_sign(float value, int k, int lane) {
  return __uint_as_float(__float_as_uint(value) ^
                         (core::rotation_signs(k) >> core::sign_bit(lane) & 1u) << 31);
}

// Where a lane's part of a plane goes. Four codes of one element column are 4 * width bits.
__device__ inline void store_column(std::uint8_t* plane, int column, int width, std::uint64_t bits,
                                    int lane) {
  if (width == 1) {
    const std::uint32_t other = __shfl_xor_sync(kFullWarp, static_cast<std::uint32_t>(bits), 1);
    if (lane % 2 == 0)
      plane[column / 2] = static_cast<std::uint8_t>(static_cast<std::uint32_t>(bits) | other << 4);
  } else if (width == 2) {
    plane[column] = static_cast<std::uint8_t>(bits);
  } else if (width == 4) {
    reinterpret_cast<std::uint16_t*>(plane)[column] = static_cast<std::uint16_t>(bits);
  } else if (width == 8) {
    reinterpret_cast<std::uint32_t*>(plane)[column] = static_cast<std::uint32_t>(bits);
  } else {
    reinterpret_cast<std::uint64_t*>(plane)[column] = bits;
  }
}

__device__ inline std::uint64_t load_column(const std::uint8_t* plane, int column, int width) {
  switch (width) {
    case 1:
      return plane[column / 2] >> column % 2 * 4 & 0xfu;
    case 2:
      return plane[column];
    case 4:
      return reinterpret_cast<const std::uint16_t*>(plane)[column];
    case 8:
      return reinterpret_cast<const std::uint32_t*>(plane)[column];
    default:
      return reinterpret_cast<const std::uint64_t*>(plane)[column];
  }
}

// Packs one group; `first` points at its first element, `count` of them follow at `stride`. With
// kScaled its values are scaled by row first.
template <typename T, bool kScaled = false>
__device__ __noinline__ void pack_special(const GroupTask& task, std::int64_t group, const T* first,
                                          std::int64_t stride, int count) {
  const int lane = threadIdx.x % 32;
  const int per_lane = task.group / 32, quarter = task.group / 4;
  const core::Planes planes = core::planes_of(task.bits);
  std::uint8_t* codes = task.codes + group * (task.group * task.bits / 8);

  // Elements as the reference loads them, and whether all are bitwise the same.
  float values[kMaxPerLane];
  bool same = true;
  const auto element_at = [&](int i) {
    if constexpr (kScaled) {
      const Affine by =
          affine_at(task.scaled, first - static_cast<const T*>(task.source) + i * stride);
      return core::scaled(core::to_float(first[i * stride]), by.shift, by.scale);
    } else {
      return first[i * stride];
    }
  };
  const auto leader = element_at(0);
#pragma unroll
  for (int k = 0; k < kMaxPerLane; ++k) {
    const int i = 32 * k + lane;
    values[k] = 0.0f;
    if (k >= per_lane || i >= count) continue;
    const auto element = element_at(i);
    if constexpr (sizeof(element) == 2) {
      same = same && element.bits == leader.bits;
    } else {
      same = same && core::bits_of(element) == core::bits_of(leader);
    }
    values[k] = core::to_float(element);
    if (task.zero_exact && core::is_finite(values[k]))
      values[k] = core::is_positive(element) ? fmaxf(values[k], 0x1p-126f) : 0.0f;
  }

  if (__all_sync(kFullWarp, same)) {
    if (lane == 0) task.headers[group] = core::kExponentMask;
    const std::uint64_t bits = core::bits_of(core::to_double(leader));
    for (int i = lane; i < task.group * task.bits / 8; i += 32)
      codes[i] = i < 8 ? static_cast<std::uint8_t>(bits >> 8 * i) : 0;
    return;
  }

  unsigned kinds = 0;  // one bit for each kind
  float low = __int_as_float(0x7f80'0000), high = -low, largest = 0.0f;
  int finite = 0;
#pragma unroll
  for (int k = 0; k < kMaxPerLane; ++k) {
    if (k >= per_lane || 32 * k + lane >= count) continue;
    const core::Kind kind = core::kind_of(values[k]);
    if (kind != core::kFinite) {
      kinds |= 1u << kind;
      continue;
    }
    ++finite;
    largest = fmaxf(largest, fabsf(values[k]));
    if (task.zero_exact && values[k] == 0.0f) continue;
    low = fminf(low, values[k]);
    high = fmaxf(high, values[k]);
  }
  kinds = __reduce_or_sync(kFullWarp, kinds);
  finite = warp_sum(finite);
  largest = warp_max(largest);
  high = warp_max(high);
  low = -warp_max(-low);
  if (low > high) low = high = 0.0f;
  const core::Kind kind = kinds == 0                       ? core::kFinite
                          : kinds == 1u << core::kPlusInf  ? core::kPlusInf
                          : kinds == 1u << core::kMinusInf ? core::kMinusInf
                                                           : core::kNan;
  const core::Levels levels = core::levels_for(task.bits, task.zero_exact, kind != core::kFinite);

  core::Range range;
  const bool mean = levels.steps == 0;
  bool full = false;
  int drawn = count;
  if (mean) {
    std::int64_t sum = 0;
#pragma unroll
    for (int k = 0; k < kMaxPerLane; ++k)
      if (k < per_lane && 32 * k + lane < count && core::is_finite(values[k]))
        sum += core::mean_term(values[k], largest);
    range.header = core::mean_header(warp_sum(sum), finite, largest, kind);
  } else {
    bool turned = false;
    if (task.rotated && kind == core::kFinite) {
      float rotated[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) rotated[k] = flip_sign(values[k], k, lane);
      warp_hadamard(rotated, lane);
      Extremes extremes{rotated[0], rotated[0]};
#pragma unroll
      for (int k = 1; k < 4; ++k) {
        extremes.low = min_nan(extremes.low, rotated[k]);
        extremes.high = max_nan(extremes.high, rotated[k]);
      }
      extremes = across_lanes<32>(extremes);
      turned = extremes.within_limits();
      if (turned) {
        range = core::round_outward_rotated(extremes.low, extremes.high, levels);
        drawn = core::kRotation;
#pragma unroll
        for (int k = 0; k < 4; ++k) values[k] = rotated[k];
      }
    }
    full = !turned && (low < -core::kHuge || high > core::kHuge);
    if (full) {
      range.header =
          core::kExponentMask | core::kFullRange | static_cast<std::uint32_t>(kind) << 16;
    } else if (!turned) {
      range = core::round_outward(low, high, levels, kind, task.rotated);
    }
  }
  if (lane == 0) task.headers[group] = range.header;

  const std::uint64_t first_block = static_cast<std::uint64_t>(task.first_group + group) *
                                    static_cast<unsigned>(task.group / core::kRandomBlock);
  const std::uint32_t offset = core::block_offset(task.key, first_block);
  // Columns of four elements a quarter apart: lane, and lane + 32 in a group of 256.
  for (int half = 0; half < quarter / 32; ++half) {
    const int column = 32 * half + lane;
    const std::uint32_t hash = core::block_hash(
        offset, task.key.second,
        static_cast<std::uint32_t>(first_block) + static_cast<unsigned>(column / 2));
    std::uint64_t low_bits = 0, high_bits = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int i = k * quarter + column;
      float value = 0.0f;
#pragma unroll
      for (int slot = 0; slot < kMaxPerLane;
           ++slot)  // a register array takes constant indices only
        if (slot == i / 32) value = values[slot];
      std::uint32_t code = 0;
      if (i < drawn) {
        const float uniform =
            core::unit_interval(hash * core::element_multiplier(column % 2 * 4 + k));
        if (!core::is_finite(value)) {
          code = core::reserved_code(task.bits);
        } else if (!mean && !(task.zero_exact && value == 0.0f)) {
          code = (full ? core::full_range_draw(value, uniform, levels)
                       : core::draw(value, range.base, range.inverse, uniform, levels)) +
                 static_cast<std::uint32_t>(levels.first);
        }
      }
      low_bits |= static_cast<std::uint64_t>(code & ((1u << planes.low) - 1u)) << planes.low * k;
      high_bits |= static_cast<std::uint64_t>(code >> planes.low) << planes.high * k;
    }
    store_column(codes, column, planes.low, low_bits, lane);
    if (planes.high != 0)
      store_column(codes + task.group * planes.low / 8, column, planes.high, high_bits, lane);
  }
}

// Calls put(i, element) for the elements of a group, `count` of them.
template <typename T, typename Put>
__device__ inline void decode_special(const GroupTask& task, std::int64_t group, int count,
                                      Put put) {
  const int lane = threadIdx.x % 32;
  const int quarter = task.group / 4;
  const core::Planes planes = core::planes_of(task.bits);
  const std::uint8_t* codes = task.codes + group * (task.group * task.bits / 8);
  const std::uint32_t header = task.headers[group];
  const bool special = (header & core::kExponentMask) == core::kExponentMask;
  const bool extended = (header & core::kExtended) != 0;
  if (special && !extended && (header & core::kFullRange) == 0) {
    const T value = core::from_double<T>(*reinterpret_cast<const double*>(codes));
    for (int i = lane; i < count; i += 32) put(i, value);
    return;
  }

  const core::Kind kind = core::kind_in(header);
  const core::Levels levels = core::levels_for(task.bits, task.zero_exact, kind != core::kFinite);
  const bool rotated = task.rotated && !special && !extended;
  const core::Grid stored = core::grid_in(header, levels);
  const core::Grid grid = rotated ? core::scaled_for_rotation(stored) : stored;
  const auto value_at = [&](std::uint32_t code) {
    if (special) return extended ? core::mean_in(header) : core::full_range_value(code, levels);
    return core::value_of(code, grid);
  };
  float turned[4];
  for (int half = 0; half < quarter / 32; ++half) {
    const int column = 32 * half + lane;
    const std::uint64_t low = load_column(codes, column, planes.low);
    const std::uint64_t high =
        planes.high == 0 ? 0
                         : load_column(codes + task.group * planes.low / 8, column, planes.high);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int i = k * quarter + column;
      const std::uint32_t code =
          static_cast<std::uint32_t>(low >> planes.low * k & ((1u << planes.low) - 1u)) |
          static_cast<std::uint32_t>(high >> planes.high * k & ((1u << planes.high) - 1u))
              << planes.low;
      if (rotated) {
        turned[k] = value_at(code);
        continue;
      }
      if (i >= count) continue;
      if (kind != core::kFinite && code == core::reserved_code(task.bits)) {
        put(i, core::element_of<T>(kind));
      } else if (!task.zero_exact) {
        put(i, core::from_float<T>(value_at(code)));
      } else if (code == 0) {
        put(i, core::from_float<T>(0.0f));
      } else {
        put(i, core::from_float<T>(fmaxf(value_at(code - 1), core::smallest_positive<T>())));
      }
    }
  }
  if (!rotated) return;
  warp_hadamard(turned, lane);
#pragma unroll
  for (int k = 0; k < 4; ++k)
    if (32 * k + lane < count)
      put(32 * k + lane, core::from_float<T>(flip_sign(turned[k], k, lane)));
}

// Restores one group; `first` points at where its first element goes.
template <typename T, bool kScaled = false>
__device__ __noinline__ void unpack_special(const GroupTask& task, std::int64_t group, T* first,
                                            std::int64_t stride, int count) {
  if constexpr (kScaled) {
    const std::int64_t element = first - static_cast<T*>(task.destination);
    decode_special<float>(task, group, count, [&](int i, float value) {
      const Affine by = affine_at(task.scaled, element + i * stride);
      first[i * stride] = core::from_float<T>(core::restored(value, by.shift, __frcp_rn(by.scale)));
    });
  } else {
    decode_special<T>(task, group, count, [&](int i, T value) { first[i * stride] = value; });
  }
}

}  // namespace backfold::cuda

#endif  // BACKFOLD_GROUP_CUDA_SPECIAL_CUH_
