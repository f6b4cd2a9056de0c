// SPDX-License-Identifier: Apache-2.0
//
// Codecs on the GPU, compared with a device-to-device copy in the same run.
//
//   cuda_bench [log2 of elements, default 28] [only rows that contain this text]
//
// Prints one row per codec: bytes read plus written per second, as a fraction of the copy's. Times
// are medians measured with CUDA events. The sample rows, which read the source twice, count each
// of its bytes once in that fraction and also show time of a copy / time of packing; there source,
// payload and result rotate over several buffers, so that none is in the cache.

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "backfold/epilogue.h"
#include "backfold/group.h"
#include "backfold/narrow.h"
#include "backfold/pool.h"
#include "backfold/predicate.h"
#include "backfold/ranged.h"
#include "backfold/samples.h"
#include "backfold/table.h"

namespace {

using backfold::ElementType;

void require(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "cuda_bench: %s failed: %s\n", what, cudaGetErrorString(cudaGetLastError()));
  std::exit(1);
}

void require(const backfold::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "cuda_bench: %s\n", status.message().data());
  std::exit(1);
}

// Normal numbers with the heavy tail of real activations, the same on every run.
__device__ float sample(std::uint64_t i) {
  std::uint64_t x = i * 0x9e37'79b9'7f4a'7c15u + 1;
  x = (x ^ x >> 30) * 0xbf58'476d'1ce4'e5b9u;
  x = (x ^ x >> 27) * 0x94d0'49bb'1331'11ebu;
  const float u = (static_cast<float>(x >> 40) + 0.5f) * 0x1p-24f;
  const float v = static_cast<float>(x & 0xff'ffffu) * 0x1p-24f;
  return sqrtf(-2.0f * logf(u)) * cosf(6.2831853f * v);
}

template <int kBytes>
__global__ void fill(void* data, std::int64_t count) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const float value = sample(static_cast<std::uint64_t>(i));
  if constexpr (kBytes == 4) {
    static_cast<float*>(data)[i] = value;
  } else {
    // bf16; the same bits are as good as fp16 numbers for timing.
    static_cast<std::uint16_t*>(data)[i] = static_cast<std::uint16_t>(__float_as_uint(value) >> 16);
  }
}

__global__ void fill_indices(std::int64_t* data, std::int64_t count) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) data[i] = i * 2654435761 % 200;
}

// Median seconds of one call.
double seconds(const std::function<void()>& call) {
  constexpr int kRuns = 15;
  cudaEvent_t start, stop;
  require(cudaEventCreate(&start) == cudaSuccess, "event");
  require(cudaEventCreate(&stop) == cudaSuccess, "event");
  for (int i = 0; i < 3; ++i) call();
  std::vector<float> times;
  for (int i = 0; i < kRuns; ++i) {
    cudaEventRecord(start);
    call();
    cudaEventRecord(stop);
    require(cudaEventSynchronize(stop) == cudaSuccess, "kernel");
    float milliseconds = 0;
    cudaEventElapsedTime(&milliseconds, start, stop);
    times.push_back(milliseconds);
  }
  cudaEventDestroy(start);
  cudaEventDestroy(stop);
  std::nth_element(times.begin(), times.begin() + kRuns / 2, times.end());
  return times[kRuns / 2] * 1e-3;
}

struct Bench {
  std::int64_t count;
  std::string only;
  void* source = nullptr;
  void* payload = nullptr;
  void* result = nullptr;
  double copy = 0;  // bytes read plus written per second

  void row(const std::string& name, std::size_t source_bytes, std::size_t packed_bytes,
           const std::function<void()>& pack, const std::function<void()>& unpack) const {
    if (name.find(only) == std::string::npos) return;
    const double bytes = static_cast<double>(source_bytes + packed_bytes);
    const double packing = seconds(pack), unpacking = seconds(unpack);
    std::printf("%-34s %8.3f %8.3f %10.0f %10.0f\n", name.c_str(), bytes / packing / copy,
                bytes / unpacking / copy, packing * 1e6, unpacking * 1e6);
    std::fflush(stdout);
  }

  void group(ElementType type, const char* layout_name, backfold::Layout layout, int bits,
             int group, bool zero_exact) const {
    backfold::GroupFormat format;
    format.type = type;
    format.bits = bits;
    format.layout = layout;
    format.group = group;
    format.zero_exact = zero_exact;
    format.count = count;
    format.columns = layout == backfold::Layout::kStrided ? 1024 : 0;
    const std::size_t packed = backfold::packed_bytes(format);
    backfold::Execution execution;
    execution.backend = backfold::Backend::kCuda;
    const std::string name = std::string(backfold::name_of(type)) + " " + layout_name +
                             (group == 256 ? " 256" : "") + (zero_exact ? " zero-exact " : " ") +
                             std::to_string(bits) + (bits == 1 ? " bit" : " bits");
    row(
        name, static_cast<std::size_t>(count) * size_of(type), packed,
        [&] {
          require(backfold::pack(format, source, {1, 2}, {payload, packed}, execution));
        },
        [&] {
          require(backfold::unpack(format, {payload, packed}, result, execution));
        });
  }

  // 4 bits unpacked with an epilogue, in both columns. `more_bytes` are read beside the payload.
  void epilogue(ElementType type, const char* name, const backfold::Epilogue& epilogue,
                backfold::Layout layout, std::size_t more_bytes) const {
    backfold::GroupFormat format;
    format.type = type;
    format.layout = layout;
    format.count = count;
    format.columns = layout == backfold::Layout::kStrided ? 1024 : 0;
    const std::size_t packed = backfold::packed_bytes(format);
    backfold::Execution execution;
    execution.backend = backfold::Backend::kCuda;
    require(backfold::pack(format, source, {1, 2}, {payload, packed}, execution));
    const auto unpack_once = [&] {
      require(backfold::unpack(format, epilogue, {payload, packed}, result, execution));
    };
    row(std::string(backfold::name_of(type)) + " epilogue " +
            (format.columns > 0 ? "strided " : "flat ") + name,
        static_cast<std::size_t>(count) * size_of(type) + more_bytes, packed, unpack_once,
        unpack_once);
  }

  // A norm over rows of 1,024, alone and with a ReLU's mask (the bits are whatever the source has),
  // batch norm over maps of 56 x 56 and 7 x 7 with that mask, SiLU, SiLU times another tensor,
  // batch norm plus another tensor, and a GELU written out, also of a packet normalised by row.
  // `table` holds 1,024 numbers.
  void epilogues(ElementType type, const float* table) const {
    const std::size_t mask_bytes = static_cast<std::size_t>(count) / 8;
    const std::size_t bytes = static_cast<std::size_t>(count) * size_of(type);
    backfold::Epilogue layer_norm, norm, large_maps, small_maps, silu, gated;
    layer_norm.rows = {table, table, 1024, 1024};
    layer_norm.columns = {table, table, 1, 1024};
    layer_norm.result_type = type;
    norm = large_maps = small_maps = layer_norm;
    large_maps.rows = {table, table, 3136, 64};
    large_maps.columns = {table, table, 3136, 64};
    small_maps.rows = {table, table, 49, 512};
    small_maps.columns = {table, table, 49, 512};
    using Kind = backfold::Step::Kind;
    const auto number = backfold::Step::From::kNumber, slot = backfold::Step::From::kSlot;
    const backfold::Step mask[] = {{.kind = Kind::kMask, .mask = {source, mask_bytes}}};
    const backfold::Step gate[] = {
        {.kind = Kind::kActivate, .activation = backfold::Activation::kSilu},
        {.kind = Kind::kMultiply,
         .from = backfold::Step::From::kTensor,
         .tensor = source,
         .type = type,
         .entries = count}};
    // x / 2 * (1 + tanh(0.8 * (x + 0.04 * x^3)))
    const backfold::Step gelu_by_hand[] = {
        {.kind = Kind::kKeep},
        {.kind = Kind::kCube},
        {.kind = Kind::kMultiply, .from = number, .factor = 0.04f},
        {.kind = Kind::kAdd, .from = slot},
        {.kind = Kind::kMultiply, .from = number, .factor = 0.8f},
        {.kind = Kind::kActivate, .activation = backfold::Activation::kTanh},
        {.kind = Kind::kAdd, .from = number},
        {.kind = Kind::kMultiply, .from = slot, .factor = 0.5f}};
    const backfold::Step sum[] = {
        {.from = backfold::Step::From::kTensor, .tensor = source, .type = type, .entries = count},
        mask[0]};
    backfold::Epilogue residual = large_maps, by_hand, by_hand_of_rows;
    norm.steps = large_maps.steps = small_maps.steps = mask;
    silu.steps = std::span(gate).first(1);
    gated.steps = gate;
    residual.steps = sum;
    by_hand.steps = by_hand_of_rows.steps = gelu_by_hand;
    by_hand_of_rows.packed_rows = {table, table, 1024, 1024};
    silu.result_type = gated.result_type = by_hand.result_type = type;
    by_hand_of_rows.result_type = type;
    epilogue(type, "batch norm 3136 + mask", large_maps, backfold::Layout::kFlat, mask_bytes);
    epilogue(type, "batch norm 49 + mask", small_maps, backfold::Layout::kFlat, mask_bytes);
    epilogue(type, "batch norm + tensor + mask", residual, backfold::Layout::kFlat,
             bytes + mask_bytes);
    for (const auto layout : {backfold::Layout::kFlat, backfold::Layout::kStrided}) {
      epilogue(type, "layer norm", layer_norm, layout, 0);
      epilogue(type, "norm + mask", norm, layout, mask_bytes);
      epilogue(type, "silu", silu, layout, 0);
      epilogue(type, "silu * tensor", gated, layout, bytes);
      epilogue(type, "gelu by hand", by_hand, layout, 0);
      epilogue(type, "gelu by hand, rows", by_hand_of_rows, layout, 0);
    }
  }

  // As many side x side maps as the elements allow; `inner` channels are adjacent in memory.
  void pool(ElementType type, int block, int bits, std::int64_t side, std::int64_t inner) const {
    backfold::PoolFormat format;
    format.type = type;
    format.block = block;
    format.bits = bits;
    format.outer = count / (side * side * inner);
    format.height = format.width = side;
    format.inner = inner;
    const std::size_t packed = backfold::packed_bytes(format);
    backfold::Execution execution;
    execution.backend = backfold::Backend::kCuda;
    const std::string map = std::to_string(side) + "x" + std::to_string(side);
    row(
        std::string(backfold::name_of(type)) + " pool " + std::to_string(block) + " " +
            (inner == 1 ? map : map + "x" + std::to_string(inner)) +
            (bits == 0 ? "" : " + " + std::to_string(bits) + (bits == 1 ? " bit" : " bits")),
        static_cast<std::size_t>(backfold::count(format)) * size_of(type), packed,
        [&] {
          require(backfold::pack(format, source, {1, 2}, {payload, packed}, execution));
        },
        [&] {
          require(backfold::unpack(format, {payload, packed}, result, execution));
        });
  }

  // widen() only reads the source; its row shows it in both columns.
  void ranged(ElementType type, const char* shape_name, std::int64_t channels, std::int64_t inner,
              int bits, float* ranges) const {
    const backfold::RangedFormat format = {type, bits, count / channels / inner, channels, inner};
    const std::size_t packed = backfold::packed_bytes(format);
    const std::size_t bytes =
        static_cast<std::size_t>(format.outer * channels * inner) * size_of(type);
    backfold::Execution execution;
    execution.backend = backfold::Backend::kCuda;
    const std::string name = std::string(backfold::name_of(type)) + " ranged " + shape_name + " ";
    const auto widen_once = [&] {
      require(backfold::widen(format, source, ranges, ranges, execution));
    };
    row(
        name + std::to_string(bits) + " bits", bytes, packed,
        [&] {
          require(backfold::pack(format, source, ranges, {1, 2}, {payload, packed}, execution));
        },
        [&] {
          require(backfold::unpack(format, {payload, packed}, result, execution));
        });
    if (bits == 8) row(name + "widen", bytes, 0, widen_once, widen_once);
  }

  void table(ElementType type, int bits) const {
    backfold::TableFormat format;
    require(backfold::derivative_table(backfold::Activation::kGelu, bits, type, count, &format));
    const std::size_t packed = backfold::packed_bytes(format);
    backfold::Execution execution;
    execution.backend = backfold::Backend::kCuda;
    row(
        std::string(backfold::name_of(type)) + " table " + std::to_string(bits) + " bits",
        static_cast<std::size_t>(count) * size_of(type), packed,
        [&] {
          require(backfold::pack(format, source, {payload, packed}, execution));
        },
        [&] {
          require(backfold::unpack(format, {payload, packed}, result, execution));
        });
  }

  // 40% of the samples at 1 bit, 35% at 2, 20% at 4, the rest at 8.
  void samples(ElementType type, std::int64_t samples, std::int64_t per_sample) const {
    backfold::SampleFormat format{type, samples, per_sample};
    format.histogram = {samples * 40 / 100, samples * 35 / 100, 0, samples * 20 / 100, 0, 0, 0, 0};
    format.histogram[6] = samples - format.histogram[0] - format.histogram[1] - format.histogram[3];
    const std::int64_t elements = samples * per_sample;
    const std::string name = std::string(backfold::name_of(type)) + " samples " +
                             std::to_string(samples) + " x " + std::to_string(per_sample);
    if (elements > count || name.find(only) == std::string::npos) return;
    const auto bytes = static_cast<std::size_t>(elements) * size_of(type);
    const std::size_t packed = backfold::packed_bytes(format);
    backfold::Execution execution;
    execution.backend = backfold::Backend::kCuda;
    std::size_t turn = 0;
    const auto places = static_cast<std::size_t>(std::min<std::int64_t>(16, count / elements));
    const auto at = [&](void* first, std::size_t size) {
      return static_cast<char*>(first) + turn % places * ((size + 255) / 256 * 256);
    };
    const auto unpadded = [&](void* first) {  // as `fill` left the elements
      return static_cast<char*>(first) + turn % places * (bytes / 256 * 256);
    };
    const double copying = seconds([&] {
      cudaMemcpyAsync(at(result, bytes), unpadded(source), bytes, cudaMemcpyDeviceToDevice);
      ++turn;
    });
    const double packing = seconds([&] {
      require(backfold::pack(format, unpadded(source), nullptr, {1, 2},
                             {at(payload, packed), packed}, execution));
      ++turn;
    });
    const double unpacking = seconds([&] {
      require(
          backfold::unpack(format, {at(payload, packed), packed}, at(result, bytes), execution));
      ++turn;
    });
    const double moved = static_cast<double>(bytes + packed);
    std::printf("%-34s %8.3f %8.3f %10.1f %10.1f   copy %.1f us, copy / pack %.3f\n", name.c_str(),
                moved / packing / copy, moved / unpacking / copy, packing * 1e6, unpacking * 1e6,
                copying * 1e6, copying / packing);
    std::fflush(stdout);
  }
};

}  // namespace

int main(int arguments, char** argument) {
  Bench bench;
  bench.count = std::int64_t{1} << (arguments > 1 ? std::atoi(argument[1]) : 28);
  bench.only = arguments > 2 ? argument[2] : "";
  const std::size_t most = static_cast<std::size_t>(bench.count) * 8;
  require(cudaMalloc(&bench.source, most) == cudaSuccess, "allocation");
  require(cudaMalloc(&bench.payload, most / 2) == cudaSuccess, "allocation");
  require(cudaMalloc(&bench.result, most) == cudaSuccess, "allocation");
  require(cudaMemset(bench.result, 0, most) == cudaSuccess, "memset");
  require(cudaMemset(bench.payload, 0, most / 2) == cudaSuccess, "memset");
  const unsigned blocks = static_cast<unsigned>((bench.count + 255) / 256);

  cudaDeviceProp device{};
  require(cudaGetDeviceProperties(&device, 0) == cudaSuccess, "device query");
  fill<4><<<blocks, 256>>>(bench.source, bench.count);
  const std::size_t copied = static_cast<std::size_t>(bench.count) * 4;
  bench.copy = 2.0 * static_cast<double>(copied) / seconds([&] {
                 cudaMemcpyAsync(bench.result, bench.source, copied, cudaMemcpyDeviceToDevice);
               });
  std::printf("%s, %lld elements, copy %.2f TB/s (read plus written)\n", device.name,
              static_cast<long long>(bench.count), bench.copy * 1e-12);
  std::printf("%-34s %8s %8s %10s %10s\n", "", "pack", "unpack", "pack us", "unpack us");

  std::vector<float> pairs;
  for (int c = 0; c < 1024; ++c) pairs.insert(pairs.end(), {-4.0f, 4.0f});
  float* ranges = nullptr;
  require(cudaMalloc(&ranges, pairs.size() * 4) == cudaSuccess, "allocation");
  require(cudaMemcpy(ranges, pairs.data(), pairs.size() * 4, cudaMemcpyHostToDevice) == cudaSuccess,
          "copy");

  using backfold::Layout;
  for (const ElementType type : {ElementType::kF32, ElementType::kBF16, ElementType::kF16}) {
    if (type == ElementType::kF32) {
      fill<4><<<blocks, 256>>>(bench.source, bench.count);
    } else {
      fill<2><<<blocks, 256>>>(bench.source, bench.count);
    }
    for (const int bits : {4, 2}) {
      bench.group(type, "flat", Layout::kFlat, bits, 128, false);
      bench.group(type, "strided", Layout::kStrided, bits, 128, false);
      bench.group(type, "rotated", Layout::kRotated, bits, 128, false);
    }
    for (const int bits : {1, 3, 5, 6, 8})
      bench.group(type, "flat", Layout::kFlat, bits, 128, false);
    bench.group(type, "flat", Layout::kFlat, 4, 256, false);
    // Negative elements take the code of zero, as a ReLU would have made them.
    bench.group(type, "flat", Layout::kFlat, 4, 128, true);
    bench.group(type, "strided", Layout::kStrided, 4, 128, true);
    bench.epilogues(type, ranges);
    bench.samples(type, 128, 256 * 56 * 56);
    bench.samples(type, 256, 65'536);
    bench.samples(type, 256, 65'535);
    bench.samples(type, 16'384, 1'024);
    bench.samples(type, 16'384, 100);
    for (const std::int64_t side : {56, 14}) {
      for (const std::int64_t inner : {1, 64}) {
        bench.pool(type, 4, 0, side, inner);
        bench.pool(type, 8, 0, side, inner);
        bench.pool(type, 8, 2, side, inner);
      }
    }

    for (const int bits : {8, 4, 2}) {
      bench.ranged(type, "tensor", 1, bench.count, bits, ranges);
      bench.ranged(type, "channels", 1024, 1, bits, ranges);
      bench.ranged(type, "images", 64, 3136, bits, ranges);
    }
    for (const int bits : {2, 3, 4}) bench.table(type, bits);

    backfold::PredicateFormat predicate;
    predicate.type = type;
    predicate.count = bench.count;
    predicate.comparison = backfold::Comparison::kGreater;
    const std::size_t packed = backfold::packed_bytes(predicate);
    backfold::Execution execution;
    execution.backend = backfold::Backend::kCuda;
    bench.row(
        std::string(backfold::name_of(type)) + " predicate",
        static_cast<std::size_t>(bench.count) * size_of(type), packed,
        [&] {
          require(backfold::pack(predicate, bench.source, {bench.payload, packed}, execution));
        },
        [&] {
          require(backfold::unpack(predicate, {bench.payload, packed}, bench.result, execution));
        });
  }

  fill_indices<<<blocks, 256>>>(static_cast<std::int64_t*>(bench.source), bench.count);
  backfold::NarrowFormat narrow;
  narrow.type = ElementType::kI64;
  narrow.count = bench.count;
  narrow.low = 0;
  narrow.high = 199;
  const std::size_t packed = backfold::packed_bytes(narrow);
  backfold::Execution execution;
  execution.backend = backfold::Backend::kCuda;
  bench.row(
      "int64 narrowed to 8 bits", static_cast<std::size_t>(bench.count) * 8, packed,
      [&] {
        require(backfold::pack(narrow, bench.source, {bench.payload, packed}, execution));
      },
      [&] {
        require(backfold::unpack(narrow, {bench.payload, packed}, bench.result, execution));
      });
  return 0;
}
