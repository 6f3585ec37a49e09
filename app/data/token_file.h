// One llm.c token shard on disk: checked reading and atomic writing. Knows nothing of windows or batches.
//
// A shard is 256 little-endian int32 (magic, version, token count, zeros), then the tokens:
// magic 20240520 version 1: uint16; magic 20240801 version 7: uint32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace qe {

class TokenFile {
 public:
  // Checks the header, then the size, then maps the file and checks every id. Throws DataError.
  TokenFile(const std::string& path, int vocab_size);
  ~TokenFile();
  TokenFile(TokenFile&& other) noexcept;
  TokenFile(const TokenFile&) = delete;
  TokenFile& operator=(const TokenFile&) = delete;
  TokenFile& operator=(TokenFile&&) = delete;

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  [[nodiscard]] std::int64_t size() const noexcept { return count_; }  // tokens
  // Copies tokens [first, first + out.size()), which must exist.
  void read(std::int64_t first, std::span<std::int32_t> out) const;

 private:
  void check_ids(int vocab_size) const;

  std::string path_;
  std::int64_t count_ = 0;
  int bytes_per_token_ = 0;
  void* map_ = nullptr;
  std::size_t map_bytes_ = 0;
};

// Writes a uint16 shard under a temporary name beside `path`, syncs it and renames it. Throws DataError.
void write_token_file(const std::string& path, std::span<const std::uint16_t> tokens);

}  // namespace qe
