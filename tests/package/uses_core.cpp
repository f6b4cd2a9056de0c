// SPDX-License-Identifier: Apache-2.0
//
// Packs a vector and brings it back.

#include <backfold/group.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <vector>

int main() {
  std::vector<float> source(1'003), back(source.size());
  for (std::size_t i = 0; i < source.size(); ++i) source[i] = std::sin(static_cast<float>(i));

  const backfold::GroupFormat format{.bits = 4, .count = static_cast<std::int64_t>(source.size())};
  struct alignas(backfold::kPayloadAlignment) Unit {
    std::byte bytes[backfold::kPayloadAlignment];
  };
  const std::size_t size = backfold::packed_bytes(format);
  std::vector<Unit> payload((size + sizeof(Unit) - 1) / sizeof(Unit));
  if (!backfold::pack(format, source.data(), {.seed = 1}, {payload.data(), size}, {}).ok())
    return 1;
  if (!backfold::unpack(format, {payload.data(), size}, back.data(), {}).ok()) return 1;

  float error = 0;
  for (std::size_t i = 0; i < source.size(); ++i)
    error = std::max(error, std::abs(back[i] - source[i]));
  std::printf("%zu of %zu bytes, largest error %.3f\n", size, source.size() * sizeof(float), error);
  return error > 0 && error < 0.2f ? 0 : 1;  // a step of 4 bits over [-1, 1] is 0.13
}
