// Bytes as tokens: ids 0–255 are the bytes, 256 stands before each document. Vocabulary 257.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace qe {

inline constexpr int kByteVocabulary = 257;
inline constexpr std::uint16_t kByteEndOfText = 256;

inline void append_document(std::string_view text, std::vector<std::uint16_t>& tokens) {
  tokens.reserve(tokens.size() + 1 + text.size());
  tokens.push_back(kByteEndOfText);
  for (const char c : text) tokens.push_back(static_cast<unsigned char>(c));
}

}  // namespace qe
