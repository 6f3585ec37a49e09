// llm.c shards: 256 little-endian int32 (magic, version, token count, zeros), then the tokens.
// Magic 20240520 version 1: uint16; magic 20240801 version 7: uint32.
#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <limits>

#include "app/data/token_file.h"

namespace qe {
namespace {

constexpr std::size_t kHeaderBytes = 1024;

struct Variant {
  std::int32_t magic;
  std::int32_t version;
  TokenType type;
};
constexpr Variant kVariants[] = {{20240520, 1, TokenType::kU16}, {20240801, 7, TokenType::kU32}};

using Header = std::array<std::int32_t, kHeaderBytes / 4>;

std::string str(std::int64_t v) { return std::to_string(v); }

// What to do about a file that is no shard.
std::string advice_for(const std::string& path) {
  const std::string index = megatron_pair(path).index;
  std::error_code error;
  if (!std::filesystem::exists(index, error)) return "; turn text into a token file with qeffect tokenize.";
  return "; there is a " + index + ", so set data.format to \"megatron\" if that is its index.";
}

const Variant& identify(const std::string& path, const Header& header) {
  const std::int32_t magic = header[0];
  for (const Variant& v : kVariants) {
    if (magic == v.magic) {
      if (header[1] == v.version) return v;
      refuse_token_file(path, "has version " + str(header[1]) + ", wanted " + str(v.version) + " with magic " +
                                  str(v.magic) + "; write it again with qeffect tokenize.");
    }
    if (magic == static_cast<std::int32_t>(__builtin_bswap32(static_cast<std::uint32_t>(v.magic)))) {
      refuse_token_file(path, "has the byte-swapped magic of " + str(v.magic) +
                                  ": it was written on a big-endian machine; write it again in little-endian order.");
    }
  }
  refuse_token_file(path,
                    "has magic " + str(magic) + ", wanted 20240520 (uint16) or 20240801 (uint32)" + advice_for(path));
}

// An open file; closes itself.
class Descriptor {
 public:
  Descriptor(const std::string& path, int flags) : fd_(::open(path.c_str(), flags | O_CLOEXEC, 0644)) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  [[nodiscard]] int get() const noexcept { return fd_; }
  [[nodiscard]] bool is_open() const noexcept { return fd_ >= 0; }

 private:
  int fd_;
};

void write_all(int fd, const void* data, std::size_t bytes, const std::string& path) {
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t done = ::write(fd, at, bytes);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) refuse_token_file(path, std::string("cannot be written: ") + std::strerror(errno) + ".");
    at += done;
    bytes -= static_cast<std::size_t>(done);
  }
}

}  // namespace

TokenLayout llmc_layout(const std::string& path, const RegularFile& file) {
  const auto size = static_cast<std::int64_t>(file.size());
  if (size == 0) refuse_token_file(path, "is empty, wanted a header of 1024 bytes and tokens.");
  if (file.size() < kHeaderBytes) {
    refuse_token_file(path, "has " + str(size) + " bytes, wanted a header of 1024 and tokens" + advice_for(path));
  }
  Header header{};
  read_exactly(path, file, 0, header.data(), kHeaderBytes);
  const Variant& variant = identify(path, header);
  const std::int64_t count = header[2];
  if (count < 0) refuse_token_file(path, "has a token count of " + str(count) + " in its header; it is damaged.");
  const std::int64_t wanted = static_cast<std::int64_t>(kHeaderBytes) + count * size_of(variant.type);
  if (size != wanted) {
    refuse_token_file(path, "has " + str(size) + " bytes, wanted " + str(wanted) + " for the " + str(count) +
                                " tokens in its header; it is " +
                                (size < wanted ? "cut short." : "longer than its header says."));
  }
  if (count == 0) refuse_token_file(path, "holds no tokens; leave it out.");
  return {kHeaderBytes, variant.type, count};
}

void write_token_file(const std::string& path, std::span<const std::uint16_t> tokens) {
  if (tokens.size() > std::numeric_limits<std::int32_t>::max()) {
    refuse_token_file(path,
                      "would hold " + str(std::ssize(tokens)) + " tokens, at most 2147483647 fit; split the input.");
  }
  const std::string temporary = path + ".tmp";
  const Descriptor file(temporary, O_WRONLY | O_CREAT | O_TRUNC);
  if (!file.is_open()) {
    refuse_token_file(
        path, std::string("cannot be created: ") + std::strerror(errno) + "; name one in a folder that exists.");
  }
  try {
    Header header{};
    header[0] = kVariants[0].magic;
    header[1] = kVariants[0].version;
    header[2] = static_cast<std::int32_t>(tokens.size());
    write_all(file.get(), header.data(), kHeaderBytes, path);
    write_all(file.get(), tokens.data(), tokens.size_bytes(), path);
    if (::fsync(file.get()) != 0)
      refuse_token_file(path, std::string("cannot be synced: ") + std::strerror(errno) + ".");
    if (std::rename(temporary.c_str(), path.c_str()) != 0) {
      refuse_token_file(path, std::string("cannot be put in place: ") + std::strerror(errno) + ".");
    }
  } catch (...) {
    ::unlink(temporary.c_str());
    throw;
  }
}

}  // namespace qe
