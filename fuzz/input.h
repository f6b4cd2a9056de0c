// SPDX-License-Identifier: Apache-2.0
//
// Shared by the fuzz targets: reading an input field by field, and buffers whose surroundings the
// address sanitizer watches.

#ifndef BACKFOLD_FUZZ_INPUT_H_
#define BACKFOLD_FUZZ_INPUT_H_

#include <sanitizer/asan_interface.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <span>
#include <type_traits>

namespace backfold::fuzz {

// An input's fields, in order; zeros once it is used up.
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
  template <typename Choices>
  auto one_of(const Choices& choices) {
    using T = std::remove_cvref_t<decltype(choices[0])>;
    return wild_ ? any<T>() : choices[any<std::uint8_t>() % std::size(choices)];
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

inline void require(bool holds, const char* what) {
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
        data_(memory_ + offset),
        bytes_(bytes) {
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
  std::size_t bytes() const { return bytes_; }
  bool equals(const Buffer& other) const {
    return bytes_ == 0 || std::memcmp(data_, other.data_, bytes_) == 0;
  }
  void fill(std::uint8_t byte) const { std::memset(data_, byte, bytes_); }

  // Repeated to fill the buffer; zeros if there are none.
  void fill_with(std::span<const std::uint8_t> content) const {
    fill(0);
    for (std::size_t i = 0; !content.empty() && i < bytes_; i += content.size())
      std::memcpy(data_ + i, content.data(), std::min(bytes_ - i, content.size()));
  }

 private:
  std::size_t room_;
  std::uint8_t* memory_;
  std::uint8_t* data_;
  std::size_t bytes_;
};

// Where an input puts its buffers: occasionally at an alignment that is refused.
struct Places {
  Places(Input& input, std::size_t element_bytes) {
    const bool astray = input.any<std::uint8_t>() % 8 == 7;
    const std::size_t offset = input.any<std::uint8_t>();
    payload = astray ? offset % 16 : 0;
    elements = astray ? offset % 64 : offset * element_bytes % 64;
    missing = input.any<std::uint8_t>() % 8 == 7 ? input.any<std::uint8_t>() : 0;
  }
  std::size_t payload;
  std::size_t elements;
  std::size_t missing;  // bytes that the payload is short of
};

// A format that needs more than this, of payload or of elements, is skipped.
inline constexpr std::size_t kMostBytes = 1 << 20;

}  // namespace backfold::fuzz

#endif  // BACKFOLD_FUZZ_INPUT_H_
