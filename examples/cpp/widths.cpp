// SPDX-License-Identifier: Apache-2.0
//
// Packs one tensor at every width and layout and prints size, error and speed.
//
//   widths [elements, default 2^24]

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "backfold/group.h"

namespace {

constexpr std::int64_t kColumns = 1024;

// Payloads are 16-byte aligned.
struct alignas(backfold::kPayloadAlignment) Block {
  std::byte bytes[backfold::kPayloadAlignment];
};

// What a transformer saves: tokens x channels, normal except for a few channels twenty times
// larger.
std::vector<float> make_tensor(std::int64_t count) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> tensor(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < tensor.size(); ++i)
    tensor[i] = normal(random) * (i % 256 == 7 ? 20.0f : 1.0f);
  return tensor;
}

double best_seconds(const std::function<void()>& work) {
  double best = 1e30;
  for (int run = 0; run < 5; ++run) {
    const auto start = std::chrono::steady_clock::now();
    work();
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    best = std::min(best, taken.count());
  }
  return best;
}

void check(const backfold::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "widths: %s\n", status.message().data());
  std::exit(1);
}

double sum_of_squares(const std::vector<float>& values) {
  double sum = 0;
  for (const float value : values) sum += static_cast<double>(value) * value;
  return sum;
}

}  // namespace

int main(int arguments, char** argument) {
  const std::int64_t count = arguments > 1 ? std::atoll(argument[1]) : std::int64_t{1} << 24;
  if (count < kColumns || count % kColumns != 0) {
    std::fprintf(stderr, "widths: elements must be a multiple of %lld\n",
                 static_cast<long long>(kColumns));
    return 1;
  }
  const std::vector<float> source = make_tensor(count);
  std::vector<float> result(source.size());
  const double bytes = 4.0 * static_cast<double>(count);
  const double energy = sum_of_squares(source);
  const double copy =
      best_seconds([&] { std::memcpy(result.data(), source.data(), source.size() * 4); });

  std::printf(
      "%lld fp32 elements, one thread, %s; GB/s count bytes read and written, memcpy %.1f\n\n",
      static_cast<long long>(count),
      backfold::simd_targets().empty() ? "no SIMD" : backfold::simd_targets()[0].data(),
      2 * bytes / copy * 1e-9);
  std::printf("              stored            relative error        GB/s\n");
  std::printf("bits layout   bits   ratio   measured  expected   pack unpack\n");

  for (const int bits : {1, 2, 3, 4, 5, 6, 8, 16}) {
    for (const auto& [layout, name] : {std::pair{backfold::Layout::kFlat, "flat"},
                                       std::pair{backfold::Layout::kStrided, "strided"},
                                       std::pair{backfold::Layout::kRotated, "rotated"}}) {
      // A format fully describes a packet; its size depends on nothing else.
      const backfold::GroupFormat format{
          .bits = bits, .layout = layout, .count = count, .columns = kColumns};
      const std::size_t packed = backfold::packed_bytes(format);
      std::vector<Block> memory(packed / sizeof(Block));
      const backfold::Payload payload{memory.data(), packed};

      // The key determines the rounding: one seed per training run, one stream per tensor.
      const backfold::Key key{.seed = 42, .stream = 0};
      const double packing =
          best_seconds([&] { check(backfold::pack(format, source.data(), key, payload, {})); });
      const double unpacking =
          best_seconds([&] { check(backfold::unpack(format, payload, result.data(), {})); });

      // The error that the format predicts for this data, without packing. A part of it is enough.
      backfold::GroupFormat part = format;
      part.count = std::min(count, 1024 * kColumns);
      double expected = 0;
      check(backfold::expected_squared_error(part, source.data(), &expected));
      expected *= static_cast<double>(count) / static_cast<double>(part.count);

      for (std::size_t i = 0; i < source.size(); ++i) result[i] -= source[i];
      const double moved = (bytes + static_cast<double>(packed)) * 1e-9;
      std::printf("%4d %-8s %5.2f %7.2f  %9.6f %9.6f  %5.1f %6.1f\n", bits, name,
                  8.0 * static_cast<double>(packed) / static_cast<double>(count),
                  bytes / static_cast<double>(packed), std::sqrt(sum_of_squares(result) / energy),
                  std::sqrt(expected / energy), moved / packing, moved / unpacking);
    }
  }
  return 0;
}
