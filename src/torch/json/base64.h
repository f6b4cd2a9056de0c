// SPDX-License-Identifier: Apache-2.0
//
// Bytes as text that JSON can hold (RFC 4648, with padding).

#ifndef BACKFOLD_TORCH_JSON_BASE64_H_
#define BACKFOLD_TORCH_JSON_BASE64_H_

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace backfold::torch_layer {

inline constexpr std::string_view kBase64 =
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

inline std::string base64(std::string_view bytes) {
  std::string text;
  text.reserve((bytes.size() + 2) / 3 * 4);
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    const std::size_t here = std::min<std::size_t>(3, bytes.size() - i);
    std::uint32_t three = 0;
    for (std::size_t k = 0; k < 3; ++k)
      three = three << 8 | (k < here ? static_cast<unsigned char>(bytes[i + k]) : 0U);
    for (std::size_t k = 0; k < 4; ++k)
      text += k <= here ? kBase64[three >> (18 - 6 * k) & 63] : '=';
  }
  return text;
}

// None if `text` is not base64.
inline std::optional<std::string> from_base64(std::string_view text) {
  if (text.size() % 4 != 0) return std::nullopt;
  std::string bytes;
  bytes.reserve(text.size() / 4 * 3);
  for (std::size_t i = 0; i < text.size(); i += 4) {
    const bool last = i + 4 == text.size();
    const std::size_t padding = !last ? 0 : (text[i + 3] == '=') + (text.substr(i + 2, 2) == "==");
    std::uint32_t three = 0;
    for (std::size_t k = 0; k < 4; ++k) {
      const std::size_t digit = k >= 4 - padding ? 0 : kBase64.find(text[i + k]);
      if (digit == std::string_view::npos) return std::nullopt;
      three = three << 6 | static_cast<std::uint32_t>(digit);
    }
    for (std::size_t k = 0; k < 3 - padding; ++k)
      bytes += static_cast<char>(three >> (16 - 8 * k) & 255);
  }
  return bytes;
}

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_JSON_BASE64_H_
