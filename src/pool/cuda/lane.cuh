// SPDX-License-Identifier: Apache-2.0
//
// What a lane does to pack its share of a band: averages and the range of residuals in one pass
// over shared memory, codes in a second.

#ifndef BACKFOLD_POOL_CUDA_LANE_CUH_
#define BACKFOLD_POOL_CUDA_LANE_CUH_

#include "pool/cuda/codes.cuh"
#include "pool/cuda/part.cuh"
#include "pool/cuda/strip.cuh"

namespace backfold::cuda {

// What one pass over a band finds.
struct Extent {
  float low, high;  // of residuals
  bool huge;        // an element beyond 2^124
  bool finite;
};

// What drawing needs to know of a part.
struct alignas(16) Drawn {
  int staged, position, strip;
  std::uint16_t strips, width;
};

// A lane's share of a band.
template <typename T, int kRoom, Staging kStaging>
class PoolLane {
 public:
  __device__ PoolLane(const PoolTask& task, const LanePlace<kStaging>& lane, const T* elements,
                      char* room)
      : task_(task),
        lane_(lane),
        elements_(elements),
        own_(place_part<kStaging>(task, lane, lane.own_lane)),
        sums_(reinterpret_cast<float*>(room) + lane.own_band * task.slots),
        averages_(reinterpret_cast<float*>(room + task.average_offset) +
                  lane.own_band * task.group * task.run),
        parts_(reinterpret_cast<Drawn*>(room + task.part_offset) + lane.own_band * task.items),
        bases_(reinterpret_cast<float*>(room + task.base_offset) + lane.own_band * task.items) {}

  __device__ const Part& own() const { return own_; }

  // Writes the averages, and reads what residuals span.
  template <bool kResidual>
  __device__ Extent average() const {
    if (task_.parts != 1) average_parts();
    Extent extent{INFINITY, -INFINITY, false, true};
    for_parts<kStaging>(task_, lane_, own_, [&](const Part& part, int item) {
      float sum = 0.0f;
      StripExtremes<T> extremes;
      for_strips(part.staged, part.strips, [&](const Strip& strip) {
        sum = sum + core::tree_sum<kRoom>(masked(strip, part.width).x, 1.0f) * core::kSumScale;
        if constexpr (kResidual) extremes.add(filled(strip, part.width));
      });
      if (!core::is_finite(sum)) sum = careful_sum(part);
      extent.finite = extent.finite && core::is_finite(sum);
      float base = 0.0f;
      if (part.in_block != 0)
        base = task_.parts == 1 ? put_average(part, sum) : averages_[part.place];
      if constexpr (kResidual) {
        const float2 ends = extremes.numbers();
        extent.huge = extent.huge || ends.x < -core::kPoolHuge || ends.y > core::kPoolHuge;
        extent.low = fminf(extent.low, ends.x - base);
        extent.high = fmaxf(extent.high, ends.y - base);
        parts_[item] = {part.staged, part.position, part.strip,
                        static_cast<std::uint16_t>(part.strips),
                        static_cast<std::uint16_t>(part.width)};
        bases_[item] = base;
      }
    });
    return extent;
  }

  // Draws the codes into the words of the band, which are zeros.
  __device__ void draw(const core::Range& range, bool full_range, std::uint32_t* words) const {
    const int bits_of_piece = kPiece * task_.bits;
    if (!full_range && task_.bytewise && bits_of_piece == 16) {
      draw_each<std::uint32_t>(
          range, [&](const float* x, std::uint32_t hash, const Draw& draw, int at, std::uint32_t) {
            reinterpret_cast<std::uint16_t*>(words)[at >> 4] =
                static_cast<std::uint16_t>(codes<std::uint32_t>(x, hash, draw));
          });
    } else if (!full_range && bits_of_piece <= 32) {
      draw_each<std::uint32_t>(range, [&](const float* x, std::uint32_t hash, const Draw& draw,
                                          int at, std::uint32_t mask) {
        put_codes(words, at, codes<std::uint32_t>(x, hash, draw) & mask);
      });
    } else {
      draw_each<std::uint64_t>(range, [&](const float* x, std::uint32_t hash, const Draw& draw,
                                          int at, std::uint64_t mask) {
        const std::uint64_t drawn =
            full_range ? full_range_codes(x, hash) : codes<std::uint64_t>(x, hash, draw);
        put_codes(words, at, drawn & mask);
      });
    }
  }

 private:
  static constexpr int kPiece = piece_of(kRoom);

  using Strip = Neighbours<T, kRoom>;
  struct Numbers {
    float x[kRoom];
  };
  // How elements of a block are drawn.
  struct Draw {
    core::BandDraw band;
    float shift;
  };

  // Calls put(elements, hash, how they are drawn, bit in the words, bits of codes that are there)
  // for all pieces; Word holds the codes of one.
  template <typename Word, typename Put>
  __device__ void draw_each(const core::Range& range, const Put& put) const {
    const core::BandDraw band = core::band_draw(range.inverse, task_.levels);
    const std::uint64_t first_draw = static_cast<std::uint64_t>(lane_.band.index) *
                                     static_cast<std::uint64_t>(task_.slots * task_.draws);
    const std::uint32_t offset =
        core::block_offset(task_.key, first_draw) + static_cast<std::uint32_t>(first_draw);
    for (int item = lane_.own_lane; item < task_.items; item += task_.lanes) {
      const Drawn part = parts_[item];
      const Draw draw{band, core::block_shift(core::block_base(bases_[item], range.base), band)};
      Word masks[kRoom / kPiece];
#pragma unroll
      for (int piece = 0; piece < kRoom; piece += kPiece) {
        const int bits = min(max(part.width - piece, 0), kPiece) * task_.bits;
        masks[piece / kPiece] = bits == 8 * sizeof(Word) ? ~Word{0} : (Word{1} << bits) - 1;
      }
      std::uint32_t block = offset + static_cast<std::uint32_t>(part.strip * task_.draws);
      int at = part.position * task_.bits;
      for_strips(part.staged, part.strips, [&](const Strip& strip) {
        float x[kRoom];
        strip.to_numbers(x);
#pragma unroll
        for (int piece = 0; piece < kRoom; piece += kPiece)
          put(x + piece, core::block_hash(block, task_.key.second, piece / 8), draw,
              at + piece * task_.bits, masks[piece / kPiece]);
        block += static_cast<std::uint32_t>(task_.run * task_.draws);
        at += lane_.band.run_length * task_.bits;
      });
    }
  }

  // Calls visit(strip) for some strips of a block.
  template <typename Visit>
  __device__ void for_strips(int staged, int strips, const Visit& visit) const {
    const T* at = elements_ + staged;
#pragma unroll 1
    for (int r = 0; r < strips; ++r, at += task_.staged_row)
      visit(load_strip<kRoom, kStaging>(at, task_));
  }

  static constexpr bool kShortStrips =
      kStaging != Staging::kVectors && kStaging != Staging::kSquares;

  // The numbers of a strip, zeros beyond its width.
  __device__ Numbers masked(Strip strip, int width) const {
    if constexpr (kShortStrips) {
#pragma unroll
      for (int i = 0; i < Strip::kWords; ++i) strip.words[i] &= Strip::mask_of(i, width);
    }
    Numbers numbers;
    strip.to_numbers(numbers.x);
    return numbers;
  }

  // The strip with copies of its first element beyond its width.
  __device__ Strip filled(Strip strip, int width) const {
    if constexpr (kShortStrips) {
#pragma unroll
      for (int i = 0; i < Strip::kWords; ++i) {
        const std::uint32_t mask = Strip::mask_of(i, width);
        strip.words[i] = (strip.words[i] & mask) | (strip.first_in(i) & ~mask);
      }
    }
    return strip;
  }

  // The sum of a block of which the plain one is not finite: each strip scaled with care.
  __device__ float careful_sum(const Part& part) const {
    float sum = 0.0f;
    for_strips(part.staged, part.strips, [&](const Strip& strip) {
      sum = sum + core::strip_sum<kRoom>(masked(strip, part.width).x);
    });
    return sum;
  }

  __device__ float put_average(const Part& block, float sum) const {
    const bool whole = block.in_block == task_.rows * task_.block;
    const std::uint16_t rounded =
        core::average_of(sum, whole ? task_.factor : core::mean_factor(block.in_block));
    task_.averages[block.average(task_)] = rounded;
    return core::bfloat_to_float(rounded);
  }

  // The averages of blocks that have parts, whose sums meet in shared memory.
  __device__ void average_parts() const {
    for_parts<kStaging>(task_, lane_, own_, [&](const Part& part, int) {
      float* sum = sums_ + part.strip;
      for_strips(part.staged, part.strips, [&](const Strip& strip) {
        *sum = core::strip_sum<kRoom>(masked(strip, part.width).x);
        sum += task_.run;
      });
#pragma unroll 1
      for (int r = part.strips; r < part.slots; ++r) sums_[part.strip + r * task_.run] = 0.0f;
    });
    __syncwarp();
    for (int place = lane_.own_lane; place < task_.group * task_.run; place += task_.lanes) {
      const Part block = place_part<kStaging>(task_, lane_, place * task_.parts);
      if (block.in_block == 0) continue;
      float sum = 0.0f;
#pragma unroll 1
      for (int r = 0; r < task_.rows; ++r) sum = sum + sums_[block.strip + r * task_.run];
      averages_[place] = put_average(block, sum);
    }
    __syncwarp();
  }

  template <typename Word>
  __device__ Word codes(const float* x, std::uint32_t hash, const Draw& draw) const {
    std::uint32_t quads[2] = {task_.magic_debt, task_.magic_debt};
#pragma unroll
    for (int j = 0; j < kPiece; ++j) {
      const float uniform = core::unit_interval(hash * core::element_multiplier(j));
      const float raised = core::pool_raised(x[j], draw.shift, draw.band, uniform);
      quads[j / 4] += magic_floor(raised) * task_.places[j % 4];
    }
    if constexpr (kPiece == 4) return quads[0];
    return quads[0] + quads[1] * static_cast<Word>(task_.fifth_place);
  }

  // Codes of elements beyond 2^124, or beside such.
  __device__ std::uint64_t full_range_codes(const float* x, std::uint32_t hash) const {
    std::uint64_t codes = 0;
#pragma unroll
    for (int j = 0; j < kPiece; ++j)
      codes |= static_cast<std::uint64_t>(full_range_code(
                   x[j], core::unit_interval(hash * core::element_multiplier(j)), task_.levels))
               << j * task_.bits;
    return codes;
  }
  // Out of line: it takes fp64.
  __device__ static __noinline__ std::uint32_t full_range_code(float value, float uniform,
                                                               const core::Levels& levels) {
    return core::full_range_draw(value, uniform, levels);
  }

  const PoolTask& task_;
  const LanePlace<kStaging>& lane_;
  const T* elements_;
  Part own_;
  float* sums_;      // of strips, where blocks have parts
  float* averages_;  // of blocks, likewise
  Drawn* parts_;
  float* bases_;
};

}  // namespace backfold::cuda

#endif  // BACKFOLD_POOL_CUDA_LANE_CUH_
