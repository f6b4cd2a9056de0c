// SPDX-License-Identifier: Apache-2.0
//
// Drawing codes, putting them together, and decoding them, for one lane.
//
// A lane holds 16 bytes of neighbouring elements from each quarter of a group, so the four codes of
// one element column stand side by side in the plane (group.h) and nothing crosses lanes on the way
// to whole bytes. Eight codes share a hash (rng.h) and make one block of `width` bytes per plane.

#ifndef BACKFOLD_GROUP_CUDA_CODES_CUH_
#define BACKFOLD_GROUP_CUDA_CODES_CUH_

#include <cstdint>

#include "base/arithmetic.h"
#include "base/cuda/magic.cuh"
#include "group/cuda/task.cuh"
#include "group/geometry.h"

namespace backfold::cuda {

// Codes of `kBlocks` blocks of one plane, packed into 32-bit words.
template <int kWidth, int kBlocks>
struct PlaneWords {
  static constexpr int kBits = 8 * kWidth * kBlocks;
  static constexpr int kWords = (kBits + 31) / 32;
  static constexpr int kBytes = kBits / 8;
  std::uint32_t words[kWords];

  // The sum of kMagic at every code's place, taken off in advance: adding codes with their magic on
  // then leaves the codes alone.
  BACKFOLD_HD static constexpr std::uint32_t magic_debt(int word) {
    std::uint32_t debt = 0;
    for (int code = 0; code < 8 * kBlocks; ++code)
      if (kWidth * code / 32 == word) debt -= kMagic << kWidth * code % 32;
    return debt;
  }

  template <int kWord = 0>
  __device__ void start(bool with_magic) {
    if constexpr (kWord < kWords) {
      constexpr std::uint32_t kDebt = magic_debt(kWord);
      words[kWord] = with_magic ? kDebt : 0u;
      start<kWord + 1>(with_magic);
    }
  }

  __device__ void add(int code_index, std::uint32_t code) {
    const int bit = kWidth * code_index;
    words[bit / 32] += code << bit % 32;
  }

  // Code number code_index + quarter, where the former is a constant multiple of 4 and the latter
  // varies.
  __device__ std::uint32_t get(int code_index, int quarter) const {
    const int bit = kWidth * code_index;
    if constexpr (kWidth == 16) {
      const std::uint32_t word = quarter < 2 ? words[bit / 32] : words[bit / 32 + 1];
      return word >> quarter % 2 * 16 & 0xffffu;
    } else {
      return words[bit / 32] >> (bit % 32 + kWidth * quarter) & ((1u << kWidth) - 1u);
    }
  }

  // Moves code number 4 * i + quarter to the place of number 4 * i.
  __device__ void move_to_first(int quarter) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (kWidth == 16) {
        if (i % 2 == 0) words[i] = (quarter < 2 ? words[i] : words[i + 1]) >> quarter % 2 * 16;
      } else {
        words[i] >>= kWidth * quarter;
      }
    }
  }

  // Where code number code_index, a multiple of 4, is cut out of its word.
  BACKFOLD_HD static constexpr int place_of(int code_index) {
    const int bit = kWidth * code_index % 32;
    return bit <= 16 ? bit : bit - 16;
  }
  // That code as a float, times 2^place_of(code_index). `magic` is kMagic where the
  // compiler does not know it: an instruction takes one constant, and the mask is one.
  __device__ float placed(int code_index, std::uint32_t magic) const {
    const int bit = kWidth * code_index, place = place_of(code_index);
    const std::uint32_t mask = ((1u << kWidth) - 1u) << place;
    return magic_number((words[bit / 32] >> (bit % 32 - place) & mask) | magic);
  }

  // The first code, which is taken off: for loops that are not unrolled.
  __device__ std::uint32_t take() {
    const std::uint32_t code = words[0] & ((1u << kWidth) - 1u);
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      words[i] = __funnelshift_r(words[i], i + 1 < kWords ? words[i + 1] : 0u, kWidth);
    return code;
  }

  // What another lane of the warp holds.
  __device__ PlaneWords from_lane(int lane) const {
    PlaneWords other;
#pragma unroll
    for (int i = 0; i < kWords; ++i) other.words[i] = __shfl_sync(kFullWarp, words[i], lane);
    return other;
  }

  // The code as a float, times 2^scale_of(code_index). It is cut out where it stands, under the
  // bits of 2^23, which keeps shifts and conversions out of the inner loop.
  __device__ static constexpr int scale_of(int code_index) {
    return kWidth <= 4 ? kWidth * (code_index % 4) : 0;
  }
  __device__ float scaled(int code_index) const {
    const int bit = kWidth * code_index;
    std::uint32_t placed;
    if constexpr (kWidth <= 4) {
      const std::uint32_t piece = words[bit / 32] >> bit % 32 / (4 * kWidth) * (4 * kWidth);
      placed = (piece & ((1u << kWidth) - 1u) << scale_of(code_index)) | kMagic;
    } else if constexpr (kWidth == 8) {
      placed = __byte_perm(words[bit / 32], kMagic, 0x7440 + bit % 32 / 8);
    } else {
      placed = __byte_perm(words[bit / 32], kMagic, bit % 32 == 0 ? 0x7410 : 0x7432);
    }
    return magic_number(placed);
  }

  // `bytes` is aligned to kBytes, or to 16 if that is less.
  __device__ void store(std::uint8_t* bytes) const {
    if constexpr (kBytes == 1) {
      *bytes = static_cast<std::uint8_t>(words[0]);
    } else if constexpr (kBytes == 2) {
      *reinterpret_cast<std::uint16_t*>(bytes) = static_cast<std::uint16_t>(words[0]);
    } else if constexpr (kBytes == 4) {
      *reinterpret_cast<std::uint32_t*>(bytes) = words[0];
    } else if constexpr (kBytes == 8) {
      *reinterpret_cast<uint2*>(bytes) = make_uint2(words[0], words[1]);
    } else {
#pragma unroll
      for (int i = 0; i < kBytes / 16; ++i)
        reinterpret_cast<uint4*>(bytes)[i] =
            make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
    }
  }

  __device__ void load(const std::uint8_t* bytes) {
    if constexpr (kBytes == 1) {
      words[0] = *bytes;
    } else if constexpr (kBytes == 2) {
      words[0] = *reinterpret_cast<const std::uint16_t*>(bytes);
    } else if constexpr (kBytes == 4) {
      words[0] = *reinterpret_cast<const std::uint32_t*>(bytes);
    } else if constexpr (kBytes == 8) {
      const uint2 raw = *reinterpret_cast<const uint2*>(bytes);
      words[0] = raw.x, words[1] = raw.y;
    } else {
#pragma unroll
      for (int i = 0; i < kBytes / 16; ++i) {
        const uint4 raw = reinterpret_cast<const uint4*>(bytes)[i];
        words[4 * i] = raw.x, words[4 * i + 1] = raw.y;
        words[4 * i + 2] = raw.z, words[4 * i + 3] = raw.w;
      }
    }
  }
};

// The codes of a lane, in their planes.
template <int kBits, int kBlocks>
struct LaneCodes {
  static constexpr core::Planes kPlanes = core::planes_of(kBits);
  static constexpr int kLow = kPlanes.low;
  static constexpr int kHigh = kPlanes.high == 0 ? 1 : kPlanes.high;
  static constexpr bool kTwo = kPlanes.high != 0;
  PlaneWords<kLow, kBlocks> low;
  PlaneWords<kHigh, kBlocks> high;  // unused, and gone, for widths of one plane

  // `with_magic`: codes come with kMagic on top. Widths of two planes mask it away.
  __device__ void start(bool with_magic) {
    low.template start<>(with_magic && !kTwo);
    if constexpr (kTwo) high.template start<>(false);
  }
  __device__ void add(int code_index, std::uint32_t code) {
    if constexpr (kTwo) {
      low.add(code_index, code & ((1u << kLow) - 1u));
      high.add(code_index, code >> kLow & ((1u << kHigh) - 1u));
    } else {
      low.add(code_index, code);
    }
  }
  __device__ std::uint32_t get(int code_index, int quarter) const {
    if constexpr (kTwo) return low.get(code_index, quarter) | high.get(code_index, quarter) << kLow;
    return low.get(code_index, quarter);
  }
  __device__ void move_to_first(int quarter) {
    low.move_to_first(quarter);
    if constexpr (kTwo) high.move_to_first(quarter);
  }
  BACKFOLD_HD static constexpr int place_of(int code_index) {
    return kTwo ? 0 : PlaneWords<kLow, kBlocks>::place_of(code_index);
  }
  __device__ float placed(int code_index, std::uint32_t magic) const {
    if constexpr (kTwo) return magic_number(get(code_index, 0) | magic);
    return low.placed(code_index, magic);
  }
  __device__ std::uint32_t take() {
    const std::uint32_t code = low.take();
    if constexpr (kTwo) return code | high.take() << kLow;
    return code;
  }
  __device__ LaneCodes from_lane(int lane) const {
    LaneCodes other;
    other.low = low.from_lane(lane);
    if constexpr (kTwo) other.high = high.from_lane(lane);
    return other;
  }

  // As PlaneWords::scaled(), for codes of either kind.
  __device__ static constexpr int scale_of(int code_index) {
    return kTwo ? 0 : PlaneWords<kLow, kBlocks>::scale_of(code_index);
  }
  __device__ float scaled(int code_index) const {
    if constexpr (kTwo) return static_cast<float>(get(code_index / 4 * 4, code_index % 4));
    return low.scaled(code_index);
  }

  // `codes` are those of the group, `lane` counts its lanes.
  __device__ void store(std::uint8_t* codes, int lane) const {
    low.store(codes + lane * PlaneWords<kLow, kBlocks>::kBytes);
    if constexpr (kTwo)
      high.store(codes + kGroup * kLow / 8 + lane * PlaneWords<kHigh, kBlocks>::kBytes);
  }
  __device__ void load(const std::uint8_t* codes, int lane) {
    low.load(codes + lane * PlaneWords<kLow, kBlocks>::kBytes);
    if constexpr (kTwo)
      high.load(codes + kGroup * kLow / 8 + lane * PlaneWords<kHigh, kBlocks>::kBytes);
  }
};

// A value's code, counted from 0 and with kMagic on; in zero-exact mode counted from 1, zeros at 0.
template <bool kZeroExact>
__device__ inline std::uint32_t draw_element(float value, float base, float inverse, float uniform,
                                             float ceiling) {
  if constexpr (!kZeroExact) return magic_draw(value, base, inverse, uniform, ceiling);
  const std::uint32_t code =
      magic_draw(fmaxf(value, 0x1p-126f), base, inverse, uniform, ceiling) + 1u;
  return value > 0.0f ? code : kMagic;
}

// Whether the fast path decodes a group: finite elements, no overflow in sight.
__device__ inline bool is_plain(std::uint32_t header, const core::Grid& grid,
                                const core::Levels& levels) {
  return (header & core::kExponentMask) != core::kExponentMask &&
         core::kind_in(header) == core::kFinite && core::is_moderate(grid, levels);
}

// The value of a code of an ordinary or far group.
template <typename T, bool kZeroExact>
__device__ inline float value_of_element(std::uint32_t code, const core::Grid& grid) {
  if constexpr (!kZeroExact) return core::value_of(code, grid);
  const float value = fmaxf(core::value_of(code - 1u, grid), core::smallest_positive<T>());
  return code == 0u ? 0.0f : value;
}

// The same for a lane's codes at constant places, with fewer instructions. Steps are divided by the
// powers of two that scaled() leaves in, exactly: a step has 8 bits and is at least 2^-126.
template <int kBits, int kBlocks>
struct Decoder {
  using Codes = LaneCodes<kBits, kBlocks>;
  float base;
  float steps[4];

  __device__ explicit Decoder(const core::Grid& grid) : base(grid.base) {
#pragma unroll
    for (int k = 0; k < 4; ++k)
      steps[k] = grid.step * (1.0f / static_cast<float>(1 << Codes::scale_of(k)));
  }

  template <typename T, bool kZeroExact>
  __device__ float value(const Codes& codes, int code_index) const {
    const float code = codes.scaled(code_index), step = steps[code_index % 4];
    if constexpr (!kZeroExact) return __fmaf_rn(code, step, base);
    const float one = static_cast<float>(1 << Codes::scale_of(code_index));
    const float value = fmaxf(__fmaf_rn(code - one, step, base), core::smallest_positive<T>());
    return code == 0.0f ? 0.0f : value;
  }
};

}  // namespace backfold::cuda

#endif  // BACKFOLD_GROUP_CUDA_CODES_CUH_
