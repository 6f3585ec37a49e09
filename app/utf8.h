// Whether bytes are UTF-8: what JSON text must be, and so every name and value that a report or manifest may repeat.
#pragma once

#include <cstddef>
#include <string_view>

namespace qe {

// Offset of the first byte that is not part of a well-formed character (RFC 3629: no overlong forms, no surrogates,
// nothing above U+10FFFF); npos: all are.
std::size_t first_invalid_utf8(std::string_view text) noexcept;

inline bool is_utf8(std::string_view text) noexcept { return first_invalid_utf8(text) == std::string_view::npos; }

}  // namespace qe
