// SPDX-License-Identifier: Apache-2.0
//
// Codes of pooling's residuals in the words of a band, in shared memory.

#ifndef BACKFOLD_POOL_CUDA_CODES_CUH_
#define BACKFOLD_POOL_CUDA_CODES_CUH_

#include <cstdint>

namespace backfold::cuda {

// Codes of up to eight elements, from bit `at` on, into words that are zero there. Lanes may share
// a word.
__device__ inline void put_codes(std::uint32_t* words, int at, std::uint32_t codes) {
  words += at >> 5;
  atomicOr(words, codes << (at & 31));
  const std::uint32_t next = __funnelshift_l(codes, 0, at & 31);
  if (next != 0) atomicOr(words + 1, next);
}
__device__ inline void put_codes(std::uint32_t* words, int at, std::uint64_t codes) {
  put_codes(words, at, static_cast<std::uint32_t>(codes));
  put_codes(words, at + 32, static_cast<std::uint32_t>(codes >> 32));
}

// `bits` bits from bit `at` of the words, and more above them; reads none that holds nothing of
// them.
__device__ inline std::uint64_t get_codes(const std::uint32_t* words, int at, int bits) {
  const int shift = at % 32;
  words += at / 32;
  std::uint64_t codes = words[0];
  if (shift + bits > 32) codes |= static_cast<std::uint64_t>(words[1]) << 32;
  codes >>= shift;
  if (shift + bits > 64) codes |= static_cast<std::uint64_t>(words[2]) << (64 - shift);
  return codes;
}

// The same for kCount codes that are whole bytes: 1, 2, 4 or 8.
template <int kCount>
__device__ inline std::uint64_t get_bytes(const std::uint32_t* words, int at, int bits) {
  const auto* const bytes = reinterpret_cast<const std::uint8_t*>(words) + at / 8;
  if (kCount * bits == 16) return *reinterpret_cast<const std::uint16_t*>(bytes);
  if (kCount * bits == 8) return *bytes;
  std::uint64_t codes = *reinterpret_cast<const std::uint32_t*>(bytes);
  if (kCount * bits == 64)
    codes |= static_cast<std::uint64_t>(reinterpret_cast<const std::uint32_t*>(bytes)[1]) << 32;
  return codes;
}

}  // namespace backfold::cuda

#endif  // BACKFOLD_POOL_CUDA_CODES_CUH_
