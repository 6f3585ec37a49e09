// Token files as one indexed set of windows. Owns the files and the window rule; order is the sampler's.
//
// A file of either form is one shard, the documents in it one after the other. Window i of a shard is its tokens [i·L,
// i·L + L], both ends included: L inputs and, one further on, L targets. Windows do not cross shards; what a shard has
// left over is counted as dropped.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "app/data/token_file.h"

namespace qe {

class TokenDataset {
 public:
  // `patterns` are paths or globs; a file that several match counts once. For Megatron pairs they name the .bin, the
  // .idx, or both by what stands before that. `key` is the config key that messages name. Throws DataError when a
  // pattern matches nothing, a file is unusable, or no shard holds a window.
  TokenDataset(const std::vector<std::string>& patterns, int vocab_size, int seq_length, const std::string& key,
               DataFormat format = DataFormat::kLlmc);

  [[nodiscard]] std::int64_t windows() const noexcept { return first_window_.back(); }
  [[nodiscard]] std::int64_t tokens() const noexcept { return tokens_; }
  [[nodiscard]] std::int64_t dropped_tokens() const noexcept { return dropped_; }
  [[nodiscard]] int seq_length() const noexcept { return seq_length_; }
  [[nodiscard]] const std::vector<TokenFile>& files() const noexcept { return files_; }

  // The L + 1 tokens of window `id` into `out`, whose size is L + 1.
  void read_window(std::int64_t id, std::span<std::int32_t> out) const;

 private:
  int seq_length_;
  std::vector<TokenFile> files_;
  std::vector<std::int64_t> first_window_;  // [files + 1]
  std::int64_t tokens_ = 0;
  std::int64_t dropped_ = 0;
};

}  // namespace qe
