// SPDX-License-Identifier: Apache-2.0
//
// Packs arbitrary elements under an arbitrary format and key, with every codec.
//
// The first bytes of an input make the format (formats.h); the next ones place the buffers, set the
// key and say how the rest becomes elements. What must hold:
//
//   - a call returns a status; reads and writes stay inside buffers of exactly the size that the
//     format asks for (the sanitizers watch), and the source is unchanged
//   - a format that validate() refuses is refused by pack() with the same message
//   - the reference and every SIMD target return the same status and, byte for byte, the same
//     packet, whatever its memory held before
//   - the packet decodes; under a lossless format, to the source

#include <concepts>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/convert.h"
#include "formats.h"
#include "input.h"

namespace backfold::fuzz {
namespace {

// How the bytes of an input become elements. Raw ones are rarely close to each other, and break
// most of the preconditions of some codecs.
enum class Kind { kRaw, kSmall, kNonNegative, kTwoValued };

double number_of(Kind kind, std::uint8_t byte) {
  switch (kind) {
    case Kind::kSmall:
      return static_cast<std::int8_t>(byte);
    case Kind::kNonNegative:
      return byte;
    default:
      return (byte & 1) * 3;
  }
}

template <typename T>
void write_element(const Buffer& buffer, std::size_t index, T element) {
  std::memcpy(buffer.data() + index * sizeof(T), &element, sizeof(T));
}

void write_number(ElementType type, const Buffer& buffer, std::size_t index, double number) {
  switch (type) {
    case ElementType::kI64:
      return write_element(buffer, index, static_cast<std::int64_t>(number));
    case ElementType::kI32:
      return write_element(buffer, index, static_cast<std::int32_t>(number));
    case ElementType::kI16:
      return write_element(buffer, index, static_cast<std::int16_t>(number));
    case ElementType::kBool:
      return write_element(buffer, index, static_cast<std::uint8_t>(number != 0));
    default:
      core::with_element(type, [&]<typename T>() {
        write_element(buffer, index, core::from_float<T>(static_cast<float>(number) / 16));
      });
  }
}

void fill_source(ElementType type, Kind kind, std::span<const std::uint8_t> bytes,
                 const Buffer& source) {
  if (kind == Kind::kRaw || bytes.empty()) return source.fill_with(bytes);
  if (source.bytes() == 0) return;  // a type that is none has no size
  for (std::size_t i = 0; i < source.bytes() / size_of(type); ++i)
    write_number(type, source, i, number_of(kind, bytes[i % bytes.size()]));
}

template <typename Format>
ElementType type_of(const Format& format) {
  if constexpr (requires { format.type; })
    return format.type;
  else
    return ElementType::kBool;  // bytes
}

// For lossless formats.
template <typename Format>
concept Lossless = std::same_as<Format, MaskFormat> || std::same_as<Format, NarrowFormat> ||
    std::same_as<Format, CopyFormat>;

// A codec's own numbers, one or two per sample or channel: an input's bytes, or the same for all.
class Numbers {
 public:
  Numbers(Input& input, std::int64_t count)
      : given_(input.flag()), buffer_(static_cast<std::size_t>(count) * sizeof(float), 0) {
    const bool raw = input.flag();
    for (std::size_t i = 0; i < buffer_.bytes() / sizeof(float); ++i)
      write_element(
          buffer_, i,
          raw ? input.any<float>() : (i % 2 == 0 ? -1.0f : 1.0f) * input.any<std::int8_t>());
  }
  bool given() const { return given_; }
  const float* data() const { return reinterpret_cast<const float*>(buffer_.data()); }

 private:
  bool given_;
  Buffer buffer_;
};

// Every way to pack is called as call(source, payload, execution).
template <typename Format, typename Call>
void pack_everywhere(const Format& format, const Places& places, Kind kind, bool served,
                     Input& input, const Call& call) {
  const Status valid = validate(format);
  const std::size_t needed = packed_bytes(format);
  std::size_t bytes = served ? needed : std::min(needed - 1, input.rest().size());
  bytes -= std::min(bytes, places.missing);
  const bool complete = valid.ok() && bytes >= needed;
  const std::size_t room = complete ? element_bytes(format) : 0;
  const Buffer source(room, places.elements), kept(room, places.elements);
  fill_source(type_of(format), kind, input.rest(), source);
  std::memcpy(kept.data(), source.data(), room);

  const Buffer expected(bytes, places.payload);
  expected.fill(0x5a);
  const Status reference =
      call(source.data(), Payload{expected.data(), bytes}, {.backend = Backend::kReference});
  if (!valid.ok())
    require(reference.message() == valid.message(), "pack() says what validate() says");
  require(complete || !reference.ok(), "a payload that is too short is refused");

  for (const std::string_view target : simd_targets()) {
    const Buffer found(bytes, places.payload);
    found.fill(0xa5);
    const Status simd = call(source.data(), Payload{found.data(), bytes},
                             {.backend = Backend::kSimd, .simd_target = target});
    require(reference.code() == simd.code(), "reference and SIMD target give the same status");
    require(!reference.ok() || found.equals(expected),
            "reference and SIMD target give the same packet");
  }
  require(source.equals(kept), "the source is not written");
  if (!reference.ok()) return;

  const Buffer decoded(room, places.elements);
  const Status unpacked =
      unpack(format, ConstPayload{expected.data(), bytes}, decoded.data(), Execution{});
  require(unpacked.ok(), "what was packed decodes");
  if constexpr (Lossless<Format>) require(decoded.equals(source), "nothing is lost");
}

// Widening runs beside packing: the same ranges from every target.
void widen_everywhere(const RangedFormat& format, const Places& places, Kind kind,
                      std::span<const std::uint8_t> bytes, const float* ranges) {
  const std::size_t room = static_cast<std::size_t>(format.channels) * 2 * sizeof(float);
  const Buffer source(element_bytes(format), places.elements), expected(room, 0);
  fill_source(format.type, kind, bytes, source);
  const auto widened = [&](const Buffer& result, const Execution& execution) {
    return widen(format, source.data(), ranges, reinterpret_cast<float*>(result.data()), execution)
        .code();
  };
  const StatusCode reference = widened(expected, {.backend = Backend::kReference});
  for (const std::string_view target : simd_targets()) {
    const Buffer found(room, 0);
    require(widened(found, {.backend = Backend::kSimd, .simd_target = target}) == reference,
            "reference and SIMD target give the same status of widen()");
    require(reference != StatusCode::kOk || found.equals(expected),
            "reference and SIMD target widen to the same ranges");
  }
}

template <typename Format>
void pack_format(const Format& format, Input& input) {
  const Places places(input, size_of_element(format));
  const Key key{input.any<std::uint64_t>(), input.any<std::uint64_t>()};
  const Kind kind = static_cast<Kind>(input.any<std::uint8_t>() % 4);
  const bool valid = validate(format).ok();
  const bool served = packed_bytes(format) <= kMostBytes && element_bytes(format) <= kMostBytes;
  const auto everywhere = [&](const auto& call) {
    pack_everywhere(format, places, kind, served, input, call);
  };

  if constexpr (std::same_as<Format, RangedFormat>) {
    const Numbers ranges(input, valid && served ? 2 * format.channels : 2);
    everywhere([&](const void* source, Payload payload, const Execution& execution) {
      return pack(format, source, ranges.data(), key, payload, execution);
    });
    if (valid && served) widen_everywhere(format, places, kind, input.rest(), ranges.data());
  } else if constexpr (std::same_as<Format, SampleFormat>) {
    const Numbers weights(input, valid && served ? format.samples : 1);
    everywhere([&](const void* source, Payload payload, const Execution& execution) {
      return pack(format, source, weights.given() ? weights.data() : nullptr, key, payload,
                  execution);
    });
  } else if constexpr (requires { pack(format, nullptr, key, Payload{}, Execution{}); }) {
    everywhere([&](const void* source, Payload payload, const Execution& execution) {
      return pack(format, source, key, payload, execution);
    });
  } else {
    everywhere([&](const void* source, Payload payload, const Execution& execution) {
      return pack(format, source, payload, execution);
    });
  }
}

}  // namespace
}  // namespace backfold::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  return backfold::fuzz::with_format({data, size},
                                     [](const auto& format, backfold::fuzz::Input& input) {
                                       backfold::fuzz::pack_format(format, input);
                                     });
}
