// One file of tokens on disk: checked reading, and atomic writing of llm.c shards. Knows nothing of windows or batches;
// what the forms are is token_layout's.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "app/data/token_layout.h"
#include "app/regular_file.h"

namespace qe {

class TokenFile {
 public:
  // `path`: a shard, or the .bin of a Megatron pair. Checks the header or index, then the size, then every id. Keeps
  // the file open. Throws DataError.
  TokenFile(const std::string& path, int vocab_size, DataFormat format = DataFormat::kLlmc);

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  [[nodiscard]] std::int64_t size() const noexcept { return layout_.count; }  // tokens
  // Copies tokens [first, first + out.size()), which must exist. Throws DataError when the file has changed since so
  // that they no longer do, or one is not below the vocabulary.
  void read(std::int64_t first, std::span<std::int32_t> out) const;

 private:
  [[noreturn]] void refuse_id(std::int64_t at, const char* advice) const;
  void read_tokens(std::int64_t first, std::span<std::int32_t> out, const char* advice) const;

  [[nodiscard]] std::uint64_t byte_of(std::int64_t token) const noexcept;

  std::string path_;
  RegularFile file_;
  std::uint32_t vocab_size_;
  TokenLayout layout_;
};

// Writes a uint16 llm.c shard under a temporary name beside `path`, syncs it and renames it. Throws DataError; then
// nothing is left behind.
void write_token_file(const std::string& path, std::span<const std::uint16_t> tokens);

}  // namespace qe
