// SPDX-License-Identifier: Apache-2.0
//
// The codes of one 16-byte vector of elements, in the elements' order, on their way between a lane
// and a plane (base/codes.h).
//
// A lane's piece stands at bit kBits * vector of the plane, so a warp that holds 32 neighbouring
// vectors moves 32 neighbouring pieces. Pieces of less than a byte are put together by shuffles.

#ifndef BACKFOLD_BASE_CUDA_CODE_PIECES_CUH_
#define BACKFOLD_BASE_CUDA_CODE_PIECES_CUH_

#include <cstdint>

#include "base/cuda/launch.h"
#include "base/cuda/magic.cuh"
#include "base/host_device.h"

namespace backfold::cuda {

template <int kWidth, int kCount>
struct Piece {
  static constexpr int kBits = kWidth * kCount;  // 2 to 64
  static constexpr int kWords = kBits <= 32 ? 1 : 2;
  static constexpr int kShare = kBits < 8 ? 8 / kBits : 1;  // pieces that make up a byte
  std::uint32_t words[kWords];

  // What to start from so that adding codes with kMagic on top leaves the codes alone.
  BACKFOLD_HD static constexpr std::uint32_t magic_debt(int word) {
    std::uint32_t debt = 0;
    for (int j = 0; j < kCount; ++j)
      if (kWidth * j / 32 == word) debt -= kMagic << kWidth * j % 32;
    return debt;
  }
  __device__ void start_with_magic() {
    constexpr std::uint32_t kFirst = magic_debt(0), kSecond = magic_debt(1);
    words[0] = kFirst;
    if constexpr (kWords == 2) words[1] = kSecond;
  }
  __device__ void start() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = 0;
  }

  __device__ void add(int j, std::uint32_t code) {
    words[kWidth * j / 32] += code << kWidth * j % 32;
  }
  __device__ std::uint32_t get(int j) const {
    return words[kWidth * j / 32] >> kWidth * j % 32 & ((1u << kWidth) - 1u);
  }
  // The code as a float, off the conversion unit.
  __device__ float number(int j) const {
    std::uint32_t placed;
    if constexpr (kWidth == 8)
      placed = __byte_perm(words[j / 4], kMagic, 0x7440 + j % 4);
    else
      placed = get(j) | kMagic;
    return magic_number(placed);
  }

  // Stores the pieces of 32 neighbouring vectors, the first a multiple of 32. The whole warp calls
  // this; a lane without `write` has nothing to store, as have those that share its byte.
  __device__ void store(std::uint8_t* plane, std::int64_t vector, bool write) const {
    if constexpr (kBits == 64) {
      if (write) reinterpret_cast<uint2*>(plane)[vector] = make_uint2(words[0], words[1]);
    } else if constexpr (kBits == 32) {
      if (write) reinterpret_cast<std::uint32_t*>(plane)[vector] = words[0];
    } else if constexpr (kBits == 16) {
      if (write)
        reinterpret_cast<std::uint16_t*>(plane)[vector] = static_cast<std::uint16_t>(words[0]);
    } else {
      std::uint32_t word = words[0];
#pragma unroll
      for (int apart = 1; apart < kShare; apart *= 2)
        word |= __shfl_down_sync(kFullWarp, word, apart) << kBits * apart;
      if (write && vector % kShare == 0) plane[vector / kShare] = static_cast<std::uint8_t>(word);
    }
  }

  __device__ void load(const std::uint8_t* plane, std::int64_t vector) {
    if constexpr (kBits == 64) {
      const uint2 raw = reinterpret_cast<const uint2*>(plane)[vector];
      words[0] = raw.x, words[1] = raw.y;
    } else if constexpr (kBits == 32) {
      words[0] = reinterpret_cast<const std::uint32_t*>(plane)[vector];
    } else if constexpr (kBits == 16) {
      words[0] = reinterpret_cast<const std::uint16_t*>(plane)[vector];
    } else {
      words[0] = static_cast<std::uint32_t>(plane[vector / kShare]) >> vector % kShare * kBits;
    }
  }
};

}  // namespace backfold::cuda

#endif  // BACKFOLD_BASE_CUDA_CODE_PIECES_CUH_
