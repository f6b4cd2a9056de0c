// SPDX-License-Identifier: Apache-2.0
//
// Decodes arbitrary bytes under an arbitrary format, with every codec.
//
// The first bytes of an input choose the codec and fill its format, with values that are allowed or
// with any; the next ones say how the buffers lie; the rest is the payload. What must hold:
//
//   - a call returns a status; reads and writes stay inside buffers of exactly the size the format
//   asks
//     for (the sanitizers watch)
//   - a format that validate() refuses is refused by unpack() with the same words
//   - reference and best SIMD target return the same status and, bit for bit, the same elements

#include <sanitizer/asan_interface.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <span>

#include "backfold/copy.h"
#include "backfold/group.h"
#include "backfold/mask.h"
#include "backfold/narrow.h"
#include "backfold/pool.h"
#include "backfold/predicate.h"
#include "backfold/ranged.h"
#include "backfold/samples.h"
#include "backfold/table.h"

namespace backfold {
namespace {

// What an input says, field by field; zeros once it is used up.
class Input {
 public:
  explicit Input(std::span<const std::uint8_t> bytes) : left_(bytes) {}

  template <typename T>
  T any() {
    T value{};
    const std::size_t size = left_.size() < sizeof(T) ? left_.size() : sizeof(T);
    if (size != 0) std::memcpy(&value, left_.data(), size);
    left_ = left_.subspan(size);
    return value;
  }

  // One of the choices; or, if the input is wild, anything.
  template <typename T, std::size_t kSize>
  T one_of(const T (&choices)[kSize]) {
    if (wild_) return any<T>();
    return choices[any<std::uint8_t>() % kSize];
  }

  bool flag() { return (any<std::uint8_t>() & 1) != 0; }
  std::int64_t count() { return wild_ ? any<std::int64_t>() : any<std::uint16_t>() % 1'024; }
  std::int64_t size(int most) {
    return wild_ ? any<std::int64_t>() : any<std::uint8_t>() % most + 1;
  }
  void set_wild(bool wild) { wild_ = wild; }
  std::span<const std::uint8_t> rest() const { return left_; }

 private:
  std::span<const std::uint8_t> left_;
  bool wild_ = false;
};

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "broken: %s\n", what);
  std::abort();
}

// `bytes` bytes that start `offset` past a multiple of 64; those around them are out of bounds.
class Buffer {
 public:
  Buffer(std::size_t bytes, std::size_t offset)
      : room_((offset + bytes) / 64 * 64 + 64),
        memory_(static_cast<std::uint8_t*>(std::aligned_alloc(64, room_))),
        data_(memory_ + offset) {
    require(memory_ != nullptr, "there is memory for a small buffer");
    ASAN_POISON_MEMORY_REGION(memory_, room_);
    ASAN_UNPOISON_MEMORY_REGION(data_, bytes);
  }
  ~Buffer() {
    ASAN_UNPOISON_MEMORY_REGION(memory_, room_);
    std::free(memory_);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  std::uint8_t* data() const { return data_; }

 private:
  std::size_t room_;
  std::uint8_t* memory_;
  std::uint8_t* data_;
};

// Where an input puts its buffers: now and then at an alignment that is refused.
struct Places {
  explicit Places(Input& input, std::size_t element_bytes) {
    const bool astray = input.any<std::uint8_t>() % 8 == 7;
    const std::size_t offset = input.any<std::uint8_t>();
    payload = astray ? offset % 16 : 0;
    destination = astray ? offset % 64 : offset * element_bytes % 64;
    missing = input.any<std::uint8_t>() % 8 == 7 ? input.any<std::uint8_t>() : 0;
  }
  std::size_t payload;
  std::size_t destination;
  std::size_t missing;  // bytes that the payload is short of
};

template <typename Format>
void decode(const Format& format, std::int64_t count, std::size_t element_bytes, Input& input) {
  const Places places(input, element_bytes);
  const Status valid = validate(format);
  const std::size_t needed = packed_bytes(format);
  require(valid.ok() || needed == 0, "packed_bytes() of a format that validate() refuses is 0");

  // A format that asks for more than this gets what the input has, and is refused.
  constexpr std::size_t kMost = 1 << 18;
  const auto bytes_of_input = input.rest();
  std::size_t bytes = needed <= kMost ? needed : bytes_of_input.size();
  bytes -= std::min(bytes, places.missing);
  Buffer payload(bytes, places.payload);
  std::memset(payload.data(), 0, bytes);
  for (std::size_t i = 0; !bytes_of_input.empty() && i < bytes; i += bytes_of_input.size())
    std::memcpy(payload.data() + i, bytes_of_input.data(),
                std::min(bytes - i, bytes_of_input.size()));

  const bool complete = valid.ok() && bytes >= needed;
  const std::size_t room = complete ? static_cast<std::size_t>(count) * element_bytes : 0;
  Buffer expected(room, places.destination), found(room, places.destination);
  const ConstPayload packed{payload.data(), bytes};
  const Status reference =
      unpack(format, packed, expected.data(), {.backend = Backend::kReference});
  const Status simd = unpack(format, packed, found.data(), {.backend = Backend::kCpu});

  if (!valid.ok())
    require(reference.message() == valid.message(), "unpack() says what validate() says");
  require(complete || !reference.ok(), "a payload that is too short is refused");
  require(reference.code() == simd.code(), "reference and SIMD target give the same status");
  if (reference.ok() && room != 0)
    require(std::memcmp(expected.data(), found.data(), room) == 0,
            "reference and SIMD target give the same elements");
}

constexpr ElementType kTypes[] = {ElementType::kF32, ElementType::kF16, ElementType::kBF16,
                                  ElementType::kF64, ElementType::kI64, ElementType::kI32,
                                  ElementType::kI16, ElementType::kBool};
constexpr int kWidths[] = {1, 2, 3, 4, 5, 6, 8, 16};
constexpr int kGroups[] = {128, 256};

void decode_group(Input& input) {
  constexpr Layout kLayouts[] = {Layout::kFlat, Layout::kStrided, Layout::kRotated};
  GroupFormat format;
  format.type = input.one_of(kTypes);
  format.bits = input.one_of(kWidths);
  format.layout = input.one_of(kLayouts);
  format.group = input.one_of(kGroups);
  format.zero_exact = input.flag();
  format.count = input.count();
  format.columns = input.count();
  if (input.flag() && format.columns > 0 && format.count > 0)
    format.count -= format.count % format.columns;
  decode(format, format.count, size_of(format.type), input);
}

void decode_predicate(Input& input) {
  constexpr Comparison kComparisons[] = {
      Comparison::kNonZero,   Comparison::kGreater,    Comparison::kGreaterEqual, Comparison::kLess,
      Comparison::kLessEqual, Comparison::kInsideOpen, Comparison::kInsideClosed};
  PredicateFormat format;
  format.type = input.one_of(kTypes);
  format.count = input.count();
  format.comparison = input.one_of(kComparisons);
  format.low = input.any<double>();
  format.high = input.any<double>();
  format.nan = input.flag();
  format.if_true = input.any<double>();
  format.if_false = input.any<double>();
  decode(format, format.count, size_of(format.type), input);
}

void decode_mask(Input& input) {
  MaskFormat format;
  format.type = input.one_of(kTypes);
  format.count = input.count();
  decode(format, format.count, size_of(format.type), input);
}

void decode_narrow(Input& input) {
  NarrowFormat format;
  format.type = input.one_of(kTypes);
  format.count = input.count();
  format.low = input.flag() ? input.any<std::int64_t>() : input.any<std::int16_t>();
  format.high = input.flag() ? input.any<std::int64_t>() : input.any<std::int16_t>();
  format.has_sentinel = input.flag();
  format.sentinel = input.flag() ? input.any<std::int64_t>() : input.any<std::int16_t>();
  decode(format, format.count, size_of(format.type), input);
}

void decode_ranged(Input& input) {
  constexpr std::int64_t kSizes[] = {0, 1, 2, 3, 5, 8, 17, 64};
  RangedFormat format;
  format.type = input.one_of(kTypes);
  format.bits = input.one_of(kWidths);
  format.outer = input.one_of(kSizes);
  format.channels = input.one_of(kSizes);
  format.inner = input.one_of(kSizes);
  const std::int64_t count =
      validate(format).ok() ? format.outer * format.channels * format.inner : 0;
  decode(format, count, size_of(format.type), input);
}

void decode_table(Input& input) {
  TableFormat format;
  format.type = input.one_of(kTypes);
  format.bits = input.one_of(kWidths);
  format.count = input.count();
  const bool rising = input.flag();
  for (std::size_t i = 0; i < format.bounds.size(); ++i)
    format.bounds[i] = rising ? static_cast<float>(i) : input.any<float>();
  for (float& value : format.values) value = input.any<float>();
  decode(format, format.count, size_of(format.type), input);
}

void decode_samples(Input& input) {
  SampleFormat format;
  format.type = input.one_of(kTypes);
  format.samples = input.flag() ? input.count() : input.any<std::uint8_t>() % 16;
  format.per_sample = input.count();
  // Unsigned: a wild input's counts may overflow.
  auto left = static_cast<std::uint64_t>(format.samples);
  for (std::int64_t& samples : format.histogram) {
    samples = input.flag() ? input.count() : input.any<std::uint8_t>() % 4;
    left -= static_cast<std::uint64_t>(samples);
  }
  if (input.flag())
    format.histogram[3] =
        static_cast<std::int64_t>(static_cast<std::uint64_t>(format.histogram[3]) + left);
  // Counts that a format refuses may be anything, their product too.
  const std::int64_t count = validate(format).ok() ? format.samples * format.per_sample : 0;
  decode(format, count, size_of(format.type), input);
}

void decode_pool(Input& input) {
  constexpr int kBlocks[] = {2, 3, 4, 7, 8, 13, 16};
  constexpr int kBits[] = {0, 1, 2, 3, 4, 8};
  PoolFormat format;
  format.type = input.one_of(kTypes);
  format.block = input.one_of(kBlocks);
  format.bits = input.one_of(kBits);
  format.outer = input.size(4);
  format.depth = input.flag() ? input.size(12) : 1;
  format.height = input.flag() ? input.size(40) : 1;
  format.width = input.size(200);
  format.inner = input.flag() ? input.size(40) : 1;
  const bool valid = validate(format).ok();
  decode(format, valid ? count(format) : 0, size_of(format.type), input);
}

void decode_copy(Input& input) {
  CopyFormat format;
  format.bytes = input.count();
  decode(format, format.bytes, 1, input);
}

}  // namespace
}  // namespace backfold

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace backfold;
  constexpr void (*kCodecs[])(Input&) = {decode_group,   decode_predicate, decode_mask,
                                         decode_narrow,  decode_ranged,    decode_table,
                                         decode_samples, decode_pool,      decode_copy};
  Input input({data, size});
  input.set_wild(input.any<std::uint8_t>() % 4 == 3);
  kCodecs[input.any<std::uint8_t>() % std::size(kCodecs)](input);
  return 0;
}
