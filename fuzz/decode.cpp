// SPDX-License-Identifier: Apache-2.0
//
// Decodes arbitrary bytes under an arbitrary format, with every codec.
//
// The first bytes of an input make the format (formats.h); the next ones place the buffers; the
// rest is the payload. What must hold:
//
//   - a call returns a status; reads and writes stay inside buffers of exactly the size that the
//     format asks for (the sanitizers watch)
//   - a format that validate() refuses is refused by unpack() with the same message
//   - the reference and every SIMD target return the same status and bitwise the same elements

#include "formats.h"
#include "input.h"

namespace backfold::fuzz {
namespace {

template <typename Format>
void decode(const Format& format, Input& input) {
  const Places places(input, size_of_element(format));
  const Status valid = validate(format);
  const std::size_t needed = packed_bytes(format);
  require(valid.ok() || needed == 0, "packed_bytes() of a format that validate() refuses is 0");

  // A format that needs more than the limit gets less, and is refused.
  const bool served = needed <= kMostBytes && element_bytes(format) <= kMostBytes;
  std::size_t bytes = served ? needed : std::min(needed - 1, input.rest().size());
  bytes -= std::min(bytes, places.missing);
  const Buffer payload(bytes, places.payload);
  payload.fill_with(input.rest());
  const ConstPayload packed{payload.data(), bytes};

  const bool complete = valid.ok() && bytes >= needed;
  const std::size_t room = complete ? element_bytes(format) : 0;
  const Buffer expected(room, places.elements);
  const Status reference =
      unpack(format, packed, expected.data(), {.backend = Backend::kReference});
  if (!valid.ok())
    require(reference.message() == valid.message(), "unpack() says what validate() says");
  require(complete || !reference.ok(), "a payload that is too short is refused");

  for (const std::string_view target : simd_targets()) {
    const Buffer found(room, places.elements);
    const Status simd =
        unpack(format, packed, found.data(), {.backend = Backend::kSimd, .simd_target = target});
    require(reference.code() == simd.code(), "reference and SIMD target give the same status");
    require(!reference.ok() || found.equals(expected),
            "reference and SIMD target give the same elements");
  }
}

}  // namespace
}  // namespace backfold::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  return backfold::fuzz::with_format({data, size},
                                     [](const auto& format, backfold::fuzz::Input& input) {
                                       backfold::fuzz::decode(format, input);
                                     });
}
