// SPDX-License-Identifier: Apache-2.0
//
// Codecs on the CPU, compared with memcpy.
//
//   core_bench [--elements=67108864] [Google Benchmark's own flags]
//
// A name reads codec/layout/bits/type/target/threads/direction. Each iteration runs the codec and
// then a memcpy of the unpacked bytes on the same threads, so that both run under the same
// conditions. `fraction` is bytes read plus written per second, codec / copy, from the fastest run
// of each: other programs only ever slow one down. Names that begin with `consumer` unpack and then
// read the result.

#include <benchmark/benchmark.h>
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "backfold/group.h"
#include "backfold/narrow.h"
#include "backfold/pool.h"
#include "backfold/predicate.h"
#include "backfold/ranged.h"
#include "backfold/samples.h"
#include "backfold/table.h"
#include "base/caches.h"

namespace {

using backfold::ElementType;
using backfold::Execution;
using backfold::Layout;
using backfold::Status;

std::int64_t elements = std::int64_t{1} << 26;
constexpr std::int64_t kColumns = 1024;  // of strided tensors

struct Release {
  void operator()(void* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<void, Release>;

// Pages that have been touched, on a multiple of 64 bytes.
Memory allocate(std::size_t bytes) {
  const std::size_t rounded = (bytes + 63) / 64 * 64;
  Memory memory(std::aligned_alloc(64, rounded));
  if (memory == nullptr) {
    std::fprintf(stderr, "core_bench: no memory for %zu bytes; give fewer --elements\n", rounded);
    std::exit(1);
  }
  std::memset(memory.get(), 0, rounded);
  return memory;
}

// Memory shared by all benchmarks, sized for int64, the largest element.
struct Arena {
  Memory source = allocate(static_cast<std::size_t>(elements) * 4);
  Memory payload = allocate(static_cast<std::size_t>(elements) * 4);
  Memory result = allocate(static_cast<std::size_t>(elements) * 4);
  Memory copy = allocate(static_cast<std::size_t>(elements) * 4);
  std::string filled;  // what the source holds
};
Arena& arena() {
  static Arena all;
  return all;
}

std::uint16_t half_bits(float value) {  // normal numbers only
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const std::uint32_t magnitude = bits & 0x7fff'ffffu;
  const std::uint32_t shifted = magnitude < 0x3880'0000u ? 0 : (magnitude - 0x3800'0000u) >> 13;
  return static_cast<std::uint16_t>((bits >> 16 & 0x8000u) | shifted);
}

enum class Data { kNormal, kRelu, kConstant };

// Normal numbers with a heavy tail, their positive part, or one number for each group of 128; from
// a table, shuffled by a hash.
void fill_floats(ElementType type, Data data = Data::kNormal) {
  const std::string wanted =
      std::string(name_of(type)) + " " + std::to_string(static_cast<int>(data));
  if (arena().filled == wanted) return;
  arena().filled = wanted;
  std::vector<float> table(1 << 16);
  for (std::size_t i = 0; i < table.size(); ++i) {
    const double u = (static_cast<double>(i * 40'503 % 65'536) + 0.5) / 65'536;
    const double v = static_cast<double>(i * 30'011 % 65'536) / 65'536;
    const double normal = std::sqrt(-2 * std::log(u)) * std::cos(6.283185307179586 * v);
    table[i] = static_cast<float>(data == Data::kRelu && normal < 0 ? 0.0 : normal);
  }
  void* source = arena().source.get();
  std::uint64_t state = 1;
  for (std::int64_t i = 0; i < elements; ++i) {
    if (data != Data::kConstant || i % 128 == 0)
      state = state * 6'364'136'223'846'793'005u + 1'442'695'040'888'963'407u;
    const float value = table[state >> 48];
    if (type == ElementType::kF32) {
      static_cast<float*>(source)[i] = value;
    } else if (type == ElementType::kF16) {
      static_cast<std::uint16_t*>(source)[i] = half_bits(value);
    } else {
      std::uint32_t bits;
      std::memcpy(&bits, &value, sizeof(bits));
      static_cast<std::uint16_t*>(source)[i] = static_cast<std::uint16_t>(bits >> 16);
    }
  }
}

// Token ids from a vocabulary of 30,522.
void fill_integers(std::int64_t count) {
  arena().filled = "int64";
  for (std::int64_t i = 0; i < count; ++i)
    static_cast<std::int64_t*>(arena().source.get())[i] = i * 2'654'435'761 % 30'522;
}

void copy_on(int threads, std::size_t bytes) {
  const auto part = [&](int index) {
    const std::size_t begin =
        bytes / static_cast<std::size_t>(threads) * static_cast<std::size_t>(index);
    const std::size_t end =
        index + 1 == threads ? bytes : begin + bytes / static_cast<std::size_t>(threads);
    std::memcpy(static_cast<char*>(arena().copy.get()) + begin,
                static_cast<const char*>(arena().source.get()) + begin, end - begin);
  };
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back(part, i);
  part(0);
  for (std::thread& other : others) other.join();
}

// Time on a clock. That of one thread stands still while other programs run, but takes half a
// microsecond to read.
double seconds_of(int threads, const std::function<void()>& work) {
  const clockid_t clock =
      threads == 1 && elements >= 1 << 20 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC;
  const auto now = [&] {
    timespec time;
    clock_gettime(clock, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  };
  const double start = now();
  work();
  return now() - start;
}

void require(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "core_bench: %s\n", status.message().data());
  std::exit(1);
}

// Times `work`, which moves source_bytes and packed_bytes, against a copy of source_bytes.
void measure(benchmark::State& state, int threads, std::size_t source_bytes,
             std::size_t packed_bytes, const std::function<void()>& work) {
  work();
  copy_on(threads, source_bytes);
  double working = INFINITY, copying = INFINITY;
  for (auto _ : state) {
    const double seconds = seconds_of(threads, work);
    state.SetIterationTime(seconds);
    working = std::min(working, seconds);
    copying = std::min(copying, seconds_of(threads, [&] { copy_on(threads, source_bytes); }));
  }
  const double moved = static_cast<double>(source_bytes + packed_bytes);
  const double copied = 2 * static_cast<double>(source_bytes) / copying;
  state.SetBytesProcessed(static_cast<std::int64_t>(moved) * state.iterations());
  state.counters["seconds"] = working;
  state.counters["copy_bytes_per_second"] = copied;
  state.counters["fraction"] = moved / working / copied;
}

void add(const std::string& name, std::function<void(benchmark::State&)> run) {
  benchmark::RegisterBenchmark(name.c_str(),
                               [run = std::move(run)](benchmark::State& state) { run(state); })
      ->UseManualTime()
      ->Unit(benchmark::kMillisecond)
      ->MinTime(0.2);
}

std::uint64_t sum_of(const void* memory, std::size_t bytes) {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < bytes / sizeof(sum); ++i)
    sum += static_cast<const std::uint64_t*>(memory)[i];
  return sum;
}

template <typename Format>
std::int64_t count_of(const Format& format) {
  if constexpr (requires { format.count; })
    return format.count;
  else if constexpr (requires { count(format); })
    return count(format);
  else if constexpr (requires { format.per_sample; })
    return format.samples * format.per_sample;
  else
    return format.outer * format.channels * format.inner;
}

// Adds name/target/threads/direction for every target, with one and two threads. `prepare` fills
// the source and packs it once.
template <typename Format, typename Pack>
void add_codec(const std::string& name, const Format& format, const std::function<void()>& prepare,
               const Pack& pack_with) {
  const std::size_t source = static_cast<std::size_t>(count_of(format)) * size_of(format.type);
  const std::size_t packed = packed_bytes(format);
  for (const std::string_view target : backfold::simd_targets()) {
    for (const int threads : {1, 2}) {
      Execution execution;
      execution.backend = backfold::Backend::kSimd;
      execution.simd_target = target;
      execution.threads = threads;
      const std::string full = name + "/" + std::string(target) + "/" + std::to_string(threads);
      const auto pack_once = [=] { require(pack_with(format, execution)); };
      const auto unpack_once = [=] {
        require(unpack(format, {arena().payload.get(), packed}, arena().result.get(), execution));
      };
      add(full + "/pack", [=](benchmark::State& state) {
        prepare();
        measure(state, threads, source, packed, pack_once);
      });
      add(full + "/unpack", [=](benchmark::State& state) {
        prepare();
        pack_once();
        measure(state, threads, source, packed, unpack_once);
      });
    }
  }
}

// Unpacks and then reads what was unpacked, as an operation of backward would: written past the
// caches whatever its size, through them, and by the library's own choice.
void add_consumer(ElementType type, Layout layout, const std::string& layout_name) {
  backfold::GroupFormat format;
  format.type = type;
  format.layout = layout;
  format.count = elements;
  format.columns = layout == Layout::kStrided ? kColumns : 0;
  const std::size_t packed = packed_bytes(format);
  const std::size_t source = static_cast<std::size_t>(elements) * size_of(type);
  const std::int64_t chosen = backfold::core::streamed_bytes();
  const std::pair<const char*, std::int64_t> ways[] = {
      {"streamed", 0}, {"stored", INT64_MAX}, {"chosen", chosen}};
  for (const std::string_view target : backfold::simd_targets()) {
    for (const auto& [way, bytes] : ways) {
      Execution execution;
      execution.backend = backfold::Backend::kSimd;
      execution.simd_target = target;
      const std::string name = std::string("consumer/") + way + " " + layout_name + "/4/" +
                               name_of(type) + "/" + std::string(target) + "/1/unpack";
      add(name, [=](benchmark::State& state) {
        fill_floats(type);
        const backfold::Payload payload = {arena().payload.get(), packed};
        require(pack(format, arena().source.get(), {1, 2}, payload, execution));
        backfold::core::streamed_bytes() = bytes;
        measure(state, 1, source, packed + source, [&] {
          require(unpack(format, {payload.data, packed}, arena().result.get(), execution));
          benchmark::DoNotOptimize(sum_of(arena().result.get(), source));
        });
        backfold::core::streamed_bytes() = chosen;
      });
    }
  }
}

void add_group(ElementType type, const std::string& name, Layout layout, int bits,
               Data data = Data::kNormal) {
  backfold::GroupFormat format;
  format.type = type;
  format.bits = bits;
  format.layout = layout;
  format.zero_exact = data == Data::kRelu;
  format.count = elements;
  format.columns = layout == Layout::kStrided ? kColumns : 0;
  add_codec(
      "group/" + name + "/" + std::to_string(bits) + "/" + name_of(type), format,
      [=] { fill_floats(type, data); },
      [](const backfold::GroupFormat& shape, const Execution& execution) {
        return pack(shape, arena().source.get(), {1, 2},
                    {arena().payload.get(), packed_bytes(shape)}, execution);
      });
}

// As many 56 x 56 maps as the elements allow; `inner` channels are adjacent in memory.
void add_pool(ElementType type, int block, int bits, std::int64_t inner) {
  backfold::PoolFormat format;
  format.type = type;
  format.block = block;
  format.bits = bits;
  format.height = format.width = 56;
  format.inner = inner;
  format.outer = elements / (56 * 56 * inner);
  add_codec(
      "pool/" + std::to_string(block) + (inner == 1 ? "/" : " channels-last/") +
          std::to_string(bits) + "/" + name_of(type),
      format, [=] { fill_floats(type); },
      [](const backfold::PoolFormat& shape, const Execution& execution) {
        return pack(shape, arena().source.get(), {1, 2},
                    {arena().payload.get(), packed_bytes(shape)}, execution);
      });
}

// One range for the whole tensor, or one for each of kColumns channels.
void add_ranged(ElementType type, const std::string& shape_name, std::int64_t channels, int bits) {
  const backfold::RangedFormat format = {type, bits, channels == 1 ? 1 : elements / channels,
                                         channels, channels == 1 ? elements : 1};
  static const std::vector<float> ranges = [] {
    std::vector<float> pairs;
    for (std::int64_t c = 0; c < kColumns; ++c) pairs.insert(pairs.end(), {-4.0f, 4.0f});
    return pairs;
  }();
  const std::string name =
      "ranged/" + shape_name + "/" + std::to_string(bits) + "/" + name_of(type);
  const auto prepare = [=] { fill_floats(type); };
  add_codec(name, format, prepare,
            [](const backfold::RangedFormat& shape, const Execution& execution) {
              return pack(shape, arena().source.get(), ranges.data(), {1, 2},
                          {arena().payload.get(), packed_bytes(shape)}, execution);
            });
  if (bits != 8) return;
  for (const int threads : {1, 2}) {
    const Execution execution = {.threads = threads};
    add(name + "/best/" + std::to_string(threads) + "/widen", [=](benchmark::State& state) {
      prepare();
      std::vector<float> widened = ranges;
      measure(state, threads, static_cast<std::size_t>(elements) * size_of(type), 0, [&] {
        require(widen(format, arena().source.get(), widened.data(), widened.data(), execution));
      });
    });
  }
}

template <typename Format>
void add_without_key(const std::string& name, const Format& format,
                     const std::function<void()>& prepare) {
  add_codec(name, format, prepare, [](const Format& shape, const Execution& execution) {
    return pack(shape, arena().source.get(), {arena().payload.get(), packed_bytes(shape)},
                execution);
  });
}

// 40% of the samples at 1 bit, 35% at 2, 20% at 4, the rest at 8: 2.3 bits on average.
void add_samples(ElementType type, std::int64_t samples) {
  backfold::SampleFormat format{type, samples, elements / samples};
  format.histogram = {samples * 40 / 100, samples * 35 / 100, 0, samples * 20 / 100, 0, 0, 0, 0};
  format.histogram[6] = samples - format.histogram[0] - format.histogram[1] - format.histogram[3];
  add_codec(
      "samples/" + std::to_string(samples) + "/mixed/" + name_of(type), format,
      [=] { fill_floats(type); },
      [](const backfold::SampleFormat& shape, const Execution& execution) {
        return pack(shape, arena().source.get(), nullptr, {1, 2},
                    {arena().payload.get(), packed_bytes(shape)}, execution);
      });
}

void add_all() {
  for (const ElementType type : {ElementType::kF32, ElementType::kBF16, ElementType::kF16}) {
    for (const int bits : {1, 2, 3, 4, 8}) {
      add_group(type, "flat", Layout::kFlat, bits);
      add_group(type, "strided", Layout::kStrided, bits);
      add_group(type, "rotated", Layout::kRotated, bits);
    }
    for (const int bits : {2, 3, 4, 8})
      add_group(type, "zero-exact", Layout::kFlat, bits, Data::kRelu);
    add_consumer(type, Layout::kFlat, "flat");
    add_consumer(type, Layout::kStrided, "strided");
    add_group(type, "constant", Layout::kFlat, 4, Data::kConstant);
    add_samples(type, 128);
    for (const std::int64_t inner : {1, 64}) {
      add_pool(type, 4, 0, inner);
      add_pool(type, 8, 0, inner);
      add_pool(type, 8, 2, inner);
    }
    backfold::PredicateFormat predicate;
    predicate.type = type;
    predicate.count = elements;
    predicate.comparison = backfold::Comparison::kGreater;
    add_without_key(std::string("predicate/greater/1/") + name_of(type), predicate,
                    [=] { fill_floats(type); });
    for (const int bits : {2, 8}) {
      add_ranged(type, "tensor", 1, bits);
      add_ranged(type, "channels", kColumns, bits);
    }
    for (const int bits : {2, 3, 4}) {
      backfold::TableFormat table;
      require(derivative_table(backfold::Activation::kGelu, bits, type, elements, &table));
      add_without_key("table/gelu/" + std::to_string(bits) + "/" + name_of(type), table,
                      [=] { fill_floats(type); });
    }
  }
  backfold::NarrowFormat narrow;
  narrow.count = elements / 2;
  narrow.high = 30'521;
  narrow.has_sentinel = true;
  narrow.sentinel = -100;
  add_without_key("narrow/tokens/16/int64", narrow,
                  [count = narrow.count] { fill_integers(count); });
}

}  // namespace

int main(int count, char** arguments) {
  benchmark::Initialize(&count, arguments);
  for (int i = 1; i < count; ++i) {
    constexpr std::string_view kFlag = "--elements=";
    const std::string_view argument = arguments[i];
    if (argument.starts_with(kFlag)) elements = std::atoll(arguments[i] + kFlag.size());
    if (!argument.starts_with(kFlag) || elements < kColumns || elements % kColumns != 0) {
      std::fprintf(stderr, "core_bench: %s: give --elements=N with N a multiple of 1024\n",
                   arguments[i]);
      return 1;
    }
  }
  add_all();
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
