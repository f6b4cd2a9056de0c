// SPDX-License-Identifier: Apache-2.0
//
// How the codec tests reach every backend with one test body.
//
//   for (const Place& place : places())
//     EXPECT_EQ(packed(format, source, place), expected) << place.name;
//
// packed() and unpacked() put their buffers where the backend works, between guard bytes, and
// expect on the way that the call succeeds, that the backend asked for ran, that no guard was
// touched and that the input is unchanged. Fresh memory never holds the same bytes twice in a row,
// so a byte that a codec leaves unwritten shows up as a difference between backends.

#ifndef BACKFOLD_TESTS_CORE_SUPPORT_H_
#define BACKFOLD_TESTS_CORE_SUPPORT_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "backfold/execution.h"
#include "backfold/status.h"
#include "backfold/types.h"

namespace backfold::testing {

using Bytes = std::vector<std::byte>;

// Where a call runs.
struct Place {
  std::string name;
  Execution execution;
};

// Every way to run a call on this machine: the reference, the default, each SIMD target, more
// threads, and CUDA where it is built and a device is there.
const std::vector<Place>& places();

// The reference, on one thread.
const Place& reference();

// What execution.ran should report for a codec, with or without SIMD kernels.
std::string_view expected_runner(const Execution& execution, bool has_simd_kernels = true);

// A buffer where a backend works, `offset` bytes past a multiple of 64, with guard bytes around it.
class Memory {
 public:
  Memory(Backend backend, std::size_t bytes, std::size_t offset = 0);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  void write(std::span<const std::byte> content);
  Bytes read() const;  // waits for the device
  bool guards_intact() const;

 private:
  static constexpr std::size_t kGuard = 64;
  Bytes read_all() const;

  Backend backend_;
  std::size_t bytes_;
  std::size_t offset_;
  std::byte fill_;
  std::byte* allocation_ = nullptr;
  std::byte* data_ = nullptr;
};

// Bytes of the elements of a format.
template <typename Format>
std::size_t element_bytes(const Format& format) {
  if constexpr (requires { format.bytes; })
    return static_cast<std::size_t>(format.bytes);
  else if constexpr (requires { format.channels; })
    return static_cast<std::size_t>(format.outer * format.channels * format.inner) *
           size_of(format.type);
  else if constexpr (requires { format.per_sample; })
    return static_cast<std::size_t>(format.samples * format.per_sample) * size_of(format.type);
  else if constexpr (requires { count(format); })
    return static_cast<std::size_t>(count(format)) * size_of(format.type);
  else
    return static_cast<std::size_t>(format.count) * size_of(format.type);
}

template <typename Format>
constexpr bool has_simd_kernels(const Format& format) {
  return !requires { format.bytes; };  // all but copies
}

// The payload that `call(source, payload, execution)` makes of `source`.
template <typename Format, typename Call>
Bytes packed_by(const Format& format, std::span<const std::byte> source, const Place& place,
                std::size_t offset, const Call& call) {
  std::string_view ran;
  Execution execution = place.execution;
  execution.ran = &ran;
  Memory input(execution.backend, source.size(), offset);
  Memory payload(execution.backend, packed_bytes(format));
  input.write(source);
  const Status status = call(input.data(), Payload{payload.data(), payload.bytes()}, execution);
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(ran, expected_runner(execution, has_simd_kernels(format)));
  EXPECT_TRUE(input.guards_intact() && payload.guards_intact()) << "written out of bounds";
  EXPECT_TRUE(std::ranges::equal(input.read(), source)) << "source was written";
  return payload.read();
}

// The payload of a codec that draws no random numbers.
template <typename Format>
Bytes packed(const Format& format, std::span<const std::byte> source, const Place& place,
             std::size_t offset = 0) {
  return packed_by(format, source, place, offset,
                   [&](const void* from, Payload payload, const Execution& where) {
                     return pack(format, from, payload, where);
                   });
}

// The payload of one that does.
template <typename Format>
Bytes packed(const Format& format, std::span<const std::byte> source, const Key& key,
             const Place& place, std::size_t offset = 0) {
  return packed_by(format, source, place, offset,
                   [&](const void* from, Payload payload, const Execution& where) {
                     return pack(format, from, key, payload, where);
                   });
}

// The elements that a payload decodes to, written `offset` bytes past a multiple of 64.
template <typename Format>
Bytes unpacked(const Format& format, std::span<const std::byte> payload, const Place& place,
               std::size_t offset = 0) {
  std::string_view ran;
  Execution execution = place.execution;
  execution.ran = &ran;
  Memory input(execution.backend, payload.size());
  Memory output(execution.backend, element_bytes(format), offset);
  input.write(payload);
  const Status status =
      unpack(format, ConstPayload{input.data(), input.bytes()}, output.data(), execution);
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(ran, expected_runner(execution, has_simd_kernels(format)));
  EXPECT_TRUE(input.guards_intact() && output.guards_intact()) << "written out of bounds";
  EXPECT_TRUE(std::ranges::equal(input.read(), payload)) << "payload was written";
  return output.read();
}

// Expects that a call fails with a code and a message that contains `words`.
void expect_error(const Status& status, StatusCode code, std::string_view words);

template <typename T>
std::span<const std::byte> bytes_of(const std::vector<T>& values) {
  return std::as_bytes(std::span<const T>(values));
}

// Reproducible random bits: SplitMix64.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next();
  std::uint64_t below(std::uint64_t limit) { return next() % limit; }

 private:
  std::uint64_t state_;
};

// Random bytes.
Bytes noise(std::size_t bytes, std::uint64_t seed);

// Sizes that leave a remainder in vectors, words, blocks, tiles or thread shares.
const std::vector<std::int64_t>& large_awkward_sizes();

}  // namespace backfold::testing

#endif  // BACKFOLD_TESTS_CORE_SUPPORT_H_
