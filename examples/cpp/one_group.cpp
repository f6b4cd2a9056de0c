// SPDX-License-Identifier: Apache-2.0
//
// One group in bytes: packs 128 small integers at 2 bits and takes the packet apart by hand.

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "backfold/group.h"

int main() {
  // -3, -1, 1 and 3, each quarter of the group starting with the next of them. 2 bits hold these
  // numbers exactly, so the bytes do not depend on the key.
  float source[128];
  for (int i = 0; i < 128; ++i) source[i] = static_cast<float>(2 * ((i + i / 32) % 4) - 3);

  const backfold::GroupFormat format{.bits = 2, .count = 128};
  alignas(backfold::kPayloadAlignment) unsigned char bytes[48];
  if (backfold::packed_bytes(format) != sizeof(bytes)) return 1;
  const backfold::Status status =
      backfold::pack(format, source, {.seed = 1}, {bytes, sizeof(bytes)}, {});
  if (!status.ok()) return 1;

  for (const int first : {0, 32, 64, 96}) {
    std::printf("elements %2d to %3d:", first, first + 31);
    for (int i = first; i < first + 5; ++i) std::printf(" %2g", source[i]);
    std::printf(" ...\n");
  }
  std::printf("\nbytes:\n");
  for (std::size_t i = 0; i < sizeof(bytes); ++i)
    std::printf("%02x%s", bytes[i], i % 16 == 15 ? "\n" : " ");

  std::uint32_t header;
  std::memcpy(&header, bytes, sizeof(header));
  const float step = std::bit_cast<float>(header & 0x7fff'0000u);
  const int m = static_cast<std::int16_t>(header & 0xffffu);
  const int exponent = std::ilogb(3 * step);
  const float unit = std::ldexp(1.0f, exponent - 7);
  std::printf("\nheader:   0x%08x\n", static_cast<unsigned>(header));
  std::printf("step:     0x%04x as bf16 = %g\n", static_cast<unsigned>(header >> 16), step);
  std::printf("m:        0x%04x = %d\n", static_cast<unsigned>(header & 0xffffu), m);
  std::printf("E:        %d, as 2^%d <= 3 * %g < 2^%d\n", exponent, exponent, step, exponent + 1);
  std::printf("unit:     2^(%d - 7) = %g\n", exponent, unit);
  std::printf("minimum:  %d * %g = %g\n\n", m, unit, m * unit);

  for (const int i : {0, 32, 64, 96, 1, 33}) {
    const int position = 4 * (i % 32) + i / 32;
    const int bit = 2 * position;
    const int code = bytes[16 + bit / 8] >> bit % 8 & 3;
    std::printf(
        "element %2d: position %3d, byte %2d bits %d..%d, code %d, value %g + %d * %g = %g\n", i,
        position, 16 + bit / 8, bit % 8 + 1, bit % 8, code, m * unit, code, step,
        m * unit + code * step);
  }
  return 0;
}
