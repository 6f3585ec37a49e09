#include "app/data/token_dataset.h"

#include <glob.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <utility>

#include "app/utf8.h"
#include "core/error.h"

namespace qe {
namespace {

// The folder that a pattern's last part was looked for in, as the user can check it.
std::string folder_of(const std::string& pattern) {
  std::error_code error;
  const std::filesystem::path folder = std::filesystem::absolute(pattern, error).parent_path();
  return error ? "the working folder" : folder.lexically_normal().string();
}

// A file that is named literally is no pattern, whatever letters its name has.
std::vector<std::string> matches_of(const std::string& pattern, const std::string& key, const std::string& advice) {
  std::error_code error;
  if (std::filesystem::exists(pattern, error)) return {pattern};
  glob_t found{};
  const int status = ::glob(pattern.c_str(), GLOB_ERR | GLOB_NOSORT, nullptr, &found);
  std::vector<std::string> paths(found.gl_pathv, found.gl_pathv + (status == 0 ? found.gl_pathc : 0));
  ::globfree(&found);
  if (status == GLOB_NOMATCH) {
    throw DataError(key + ": \"" + pattern + "\" matches no file in " + folder_of(pattern) + "; " + advice +
                    "correct the path.");
  }
  if (status != 0) throw DataError(key + ": a folder of \"" + pattern + "\" cannot be read; check its permissions.");
  return paths;
}

// Files of tokens in the C locale's order, whatever the user's locale is: the order of shards is part of the sample
// order.
std::vector<std::string> expand(const std::string& pattern, const std::string& key, DataFormat format) {
  std::vector<std::string> paths;
  if (format == DataFormat::kLlmc) {
    paths = matches_of(pattern, key, "make one with qeffect tokenize, or ");
  } else {
    const MegatronPair pair = megatron_pair(pattern);
    for (const std::string& path : matches_of(pattern == pair.tokens ? pair.tokens : pair.index, key, "")) {
      paths.push_back(megatron_pair(path).tokens);
    }
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

// Reports and manifests repeat the path, and they are JSON.
void require_utf8(const std::string& path, const std::string& key) {
  if (!is_utf8(path)) throw DataError(key + ": the name of " + path + " is not UTF-8; rename the file.");
}

// Files met so far, by device and inode: ./a.bin is a.bin.
class SeenFiles {
 public:
  // True the first time; and for a file that cannot be looked at, which opening it will say.
  bool add(const std::string& path) {
    struct stat info {};
    return ::stat(path.c_str(), &info) != 0 || seen_.emplace(info.st_dev, info.st_ino).second;
  }

 private:
  std::set<std::pair<dev_t, ino_t>> seen_;
};

}  // namespace

TokenDataset::TokenDataset(const std::vector<std::string>& patterns, int vocab_size, int seq_length,
                           const std::string& key, DataFormat format)
    : seq_length_(seq_length) {
  if (patterns.empty()) throw DataError(key + " names no token file; set it to a path or a glob.");
  std::vector<std::string> paths;
  SeenFiles seen;
  for (const std::string& pattern : patterns) {
    for (std::string& path : expand(pattern, key, format)) {
      require_utf8(path, key);
      if (seen.add(path)) paths.push_back(std::move(path));
    }
  }
  first_window_.push_back(0);
  for (const std::string& path : paths) {
    const TokenFile& file = files_.emplace_back(path, vocab_size, format);
    const std::int64_t windows = (file.size() - 1) / seq_length;
    first_window_.push_back(first_window_.back() + windows);
    tokens_ += file.size();
    dropped_ += windows == 0 ? file.size() : file.size() - (windows * seq_length + 1);
  }
  if (windows() == 0) {
    throw DataError(key + " holds " + std::to_string(tokens_) + " tokens in " + std::to_string(files_.size()) +
                    (files_.size() == 1 ? " file" : " files") +
                    " and no window; a window needs training.seq_length + 1 = " + std::to_string(seq_length + 1) +
                    " tokens of one file.");
  }
}

void TokenDataset::read_window(std::int64_t id, std::span<std::int32_t> out) const {
  QE_EXPECTS(id >= 0 && id < windows(), "a window id is below windows()");
  QE_EXPECTS(std::ssize(out) == seq_length_ + 1, "a window has L + 1 tokens");
  const auto after = std::upper_bound(first_window_.begin(), first_window_.end(), id);
  const auto shard = static_cast<std::size_t>(after - first_window_.begin() - 1);
  files_[shard].read((id - first_window_[shard]) * seq_length_, out);
}

}  // namespace qe
