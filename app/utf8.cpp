#include "app/utf8.h"

namespace qe {
namespace {

// Bytes of the character that `first` and `second` begin; 0: none begins so. The second byte's range is narrower than
// that of the ones behind it after E0 (overlong), ED (surrogates), F0 (overlong) and F4 (above U+10FFFF).
std::size_t length_of(unsigned char first, unsigned char second) noexcept {
  if (first < 0x80) return 1;
  if (first < 0xC2 || first > 0xF4) return 0;
  unsigned char low = 0x80, high = 0xBF;
  if (first == 0xE0) low = 0xA0;
  if (first == 0xED) high = 0x9F;
  if (first == 0xF0) low = 0x90;
  if (first == 0xF4) high = 0x8F;
  if (second < low || second > high) return 0;
  return first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
}

}  // namespace

std::size_t first_invalid_utf8(std::string_view text) noexcept {
  const auto byte = [text](std::size_t i) -> unsigned char {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : 0;
  };
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t length = length_of(byte(at), byte(at + 1));
    if (length == 0) return at;
    for (std::size_t i = 2; i < length; ++i) {
      if ((byte(at + i) & 0xC0) != 0x80) return at;
    }
    at += length;
  }
  return std::string_view::npos;
}

}  // namespace qe
