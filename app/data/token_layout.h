// How a file of tokens is laid out, in each form that data.format names (docs/data.md). What is found here has been
// checked against the sizes of the files; the ids themselves are checked when they are read.
#pragma once

#include <cstdint>
#include <string>

namespace qe {

class RegularFile;

enum class DataFormat : std::uint8_t { kLlmc, kMegatron };

enum class TokenType : std::uint8_t { kU8, kI8, kU16, kI16, kU32, kI32, kI64 };
int size_of(TokenType) noexcept;  // bytes of one token

struct TokenLayout {
  std::uint64_t offset = 0;  // bytes before the first token
  TokenType type = TokenType::kU16;
  std::int64_t count = 0;  // tokens, at least 1
};

// Each throws DataError that names the file and what is wrong with it. `path` and the open file are those of the
// tokens: a shard, or the .bin of a Megatron pair, whose index lies beside it.
TokenLayout llmc_layout(const std::string& path, const RegularFile&);
TokenLayout megatron_layout(const std::string& path, const RegularFile&);

// "corpus.bin" and "corpus.idx" for either of them, or for "corpus".
struct MegatronPair {
  std::string tokens, index;
};
MegatronPair megatron_pair(const std::string& path);

// Throws DataError: "Token file <path> <what>".
[[noreturn]] void refuse_token_file(const std::string& path, const std::string& what);
// Refuses a file that is no regular file or cannot be opened.
void require_readable(const std::string& path, const RegularFile&);
// Copies `bytes` from `offset`; refuses a file that has fewer.
void read_exactly(const std::string& path, const RegularFile&, std::uint64_t offset, void* to, std::size_t bytes);

}  // namespace qe
