// One llm.c token shard on disk: checked reading and atomic writing. Knows nothing of windows or batches.
//
// A shard is 256 little-endian int32 (magic, version, token count, zeros), then the tokens:
// magic 20240520 version 1: uint16; magic 20240801 version 7: uint32.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "app/regular_file.h"

namespace qe {

class TokenFile {
 public:
  // Checks the header, then the size, then every id. Keeps the file open. Throws DataError.
  TokenFile(const std::string& path, int vocab_size);

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  [[nodiscard]] std::int64_t size() const noexcept { return count_; }  // tokens
  // Copies tokens [first, first + out.size()), which must exist. Throws DataError when the file has changed since so
  // that they no longer do, or one is not below the vocabulary.
  void read(std::int64_t first, std::span<std::int32_t> out) const;

 private:
  [[noreturn]] void refuse_id(std::uint32_t id, std::int64_t at, const char* advice) const;
  void read_tokens(std::int64_t first, std::span<std::int32_t> out, const char* advice) const;

  std::string path_;
  RegularFile file_;
  std::uint32_t vocab_size_;
  std::int64_t count_ = 0;
  int bytes_per_token_ = 0;
};

// Writes a uint16 shard under a temporary name beside `path`, syncs it and renames it. Throws DataError; then nothing
// is left behind.
void write_token_file(const std::string& path, std::span<const std::uint16_t> tokens);

}  // namespace qe
