#include "app/data/token_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <limits>
#include <utility>

#include "core/error.h"

namespace qe {
namespace {

static_assert(std::endian::native == std::endian::little, "token shards are read as they lie");

constexpr std::size_t kHeaderBytes = 1024;
constexpr std::size_t kScanBlock = 1 << 16;  // tokens whose maximum is taken before it is looked at

struct Variant {
  std::int32_t magic;
  std::int32_t version;
  int bytes_per_token;
};
constexpr Variant kVariants[] = {{20240520, 1, 2}, {20240801, 7, 4}};

using Header = std::array<std::int32_t, kHeaderBytes / 4>;

std::string str(std::int64_t v) { return std::to_string(v); }

[[noreturn]] void refuse(const std::string& path, const std::string& what) {
  throw DataError("Token file " + path + " " + what);
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

const Variant& identify(const std::string& path, const Header& header) {
  const std::int32_t magic = header[0];
  for (const Variant& v : kVariants) {
    if (magic == v.magic) {
      if (header[1] == v.version) return v;
      refuse(path, "has version " + str(header[1]) + ", wanted " + str(v.version) + " with magic " + str(v.magic) +
                       "; write it again with qeffect tokenize.");
    }
    if (magic == static_cast<std::int32_t>(__builtin_bswap32(static_cast<std::uint32_t>(v.magic)))) {
      refuse(path, "has the byte-swapped magic of " + str(v.magic) +
                       ": it was written on a big-endian machine; write it again in little-endian order.");
    }
  }
  refuse(path,
         "has magic " + str(magic) +
             ", wanted 20240520 (uint16) or 20240801 (uint32); turn text into a token file with qeffect tokenize.");
}

std::size_t regular_file_size(const std::string& path, const Descriptor& file) {
  if (!file.is_open()) refuse(path, std::string("cannot be opened: ") + std::strerror(errno) + ".");
  struct stat info {};
  if (::fstat(file.get(), &info) != 0) refuse(path, std::string("cannot be read: ") + std::strerror(errno) + ".");
  if (S_ISDIR(info.st_mode)) refuse(path, "is a directory, wanted a file; name its files, as in " + path + "/*.bin.");
  if (!S_ISREG(info.st_mode)) refuse(path, "is not a regular file; copy it to one.");
  return static_cast<std::size_t>(info.st_size);
}

Header read_header(const std::string& path, const Descriptor& file, std::size_t size) {
  if (size == 0) refuse(path, "is empty, wanted a header of 1024 bytes and tokens.");
  if (size < kHeaderBytes) {
    refuse(path, "has " + str(static_cast<std::int64_t>(size)) + " bytes, wanted a header of 1024 and tokens.");
  }
  Header header{};
  if (::pread(file.get(), header.data(), kHeaderBytes, 0) != static_cast<ssize_t>(kHeaderBytes)) {
    refuse(path, std::string("cannot be read: ") + std::strerror(errno) + ".");
  }
  return header;
}

template <class Token>
std::int64_t first_at_or_above(const Token* tokens, std::int64_t count, std::uint32_t limit) {  // -1: none
  for (std::int64_t begin = 0; begin < count; begin += kScanBlock) {
    const std::int64_t end = std::min<std::int64_t>(count, begin + static_cast<std::int64_t>(kScanBlock));
    Token largest = 0;
    for (std::int64_t i = begin; i < end; ++i) largest = std::max(largest, tokens[i]);
    if (largest < limit) continue;
    return std::find_if(tokens + begin, tokens + end, [limit](Token t) { return t >= limit; }) - tokens;
  }
  return -1;
}

void write_all(int fd, const void* data, std::size_t bytes, const std::string& path) {
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t done = ::write(fd, at, bytes);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) refuse(path, std::string("cannot be written: ") + std::strerror(errno) + ".");
    at += done;
    bytes -= static_cast<std::size_t>(done);
  }
}

}  // namespace

TokenFile::TokenFile(const std::string& path, int vocab_size) : path_(path) {
  const Descriptor file(path, O_RDONLY);
  const std::size_t size = regular_file_size(path, file);
  const Header header = read_header(path, file, size);
  const Variant& variant = identify(path, header);
  if (header[2] < 0) refuse(path, "has a token count of " + str(header[2]) + " in its header; it is damaged.");
  const std::size_t wanted = kHeaderBytes + static_cast<std::size_t>(header[2]) * variant.bytes_per_token;
  if (size != wanted) {
    refuse(path, "has " + str(static_cast<std::int64_t>(size)) + " bytes, wanted " +
                     str(static_cast<std::int64_t>(wanted)) + " for the " + str(header[2]) +
                     " tokens in its header; it is " + (size < wanted ? "cut short." : "longer than its header says."));
  }
  if (header[2] == 0) refuse(path, "holds no tokens; leave it out.");
  count_ = header[2];
  bytes_per_token_ = variant.bytes_per_token;
  map_ = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (map_ == MAP_FAILED) {
    map_ = nullptr;
    refuse(path, std::string("cannot be mapped: ") + std::strerror(errno) + ".");
  }
  map_bytes_ = size;
  try {
    check_ids(vocab_size);
  } catch (...) {
    ::munmap(map_, map_bytes_);
    throw;
  }
}

TokenFile::~TokenFile() {
  if (map_ != nullptr) ::munmap(map_, map_bytes_);
}

TokenFile::TokenFile(TokenFile&& other) noexcept
    : path_(std::move(other.path_)),
      count_(std::exchange(other.count_, 0)),
      bytes_per_token_(other.bytes_per_token_),
      map_(std::exchange(other.map_, nullptr)),
      map_bytes_(std::exchange(other.map_bytes_, 0)) {}

void TokenFile::check_ids(int vocab_size) const {
  const char* data = static_cast<const char*>(map_) + kHeaderBytes;
  const auto limit = static_cast<std::uint32_t>(vocab_size);
  const std::int64_t at = bytes_per_token_ == 2
                              ? first_at_or_above(reinterpret_cast<const std::uint16_t*>(data), count_, limit)
                              : first_at_or_above(reinterpret_cast<const std::uint32_t*>(data), count_, limit);
  if (at < 0) return;
  std::uint32_t id = 0;
  std::memcpy(&id, data + at * bytes_per_token_, static_cast<std::size_t>(bytes_per_token_));
  refuse(path_, "has id " + str(id) + " at token " + str(at) + ", wanted ids below model.vocab_size " +
                    str(vocab_size) + "; set model.vocab_size to the tokenizer's.");
}

void TokenFile::read(std::int64_t first, std::span<std::int32_t> out) const {
  QE_EXPECTS(first >= 0 && first + std::ssize(out) <= count_, "a read stays inside its token file");
  const char* data = static_cast<const char*>(map_) + kHeaderBytes;
  if (bytes_per_token_ == 2) {
    const auto* tokens = reinterpret_cast<const std::uint16_t*>(data) + first;
    std::copy(tokens, tokens + out.size(), out.begin());
  } else {
    std::memcpy(out.data(), data + first * 4, out.size_bytes());
  }
}

void write_token_file(const std::string& path, std::span<const std::uint16_t> tokens) {
  if (tokens.size() > std::numeric_limits<std::int32_t>::max()) {
    refuse(path, "would hold " + str(std::ssize(tokens)) + " tokens, at most 2147483647 fit; split the input.");
  }
  const std::string temporary = path + ".tmp";
  {
    const Descriptor file(temporary, O_WRONLY | O_CREAT | O_TRUNC);
    if (!file.is_open()) refuse(temporary, std::string("cannot be created: ") + std::strerror(errno) + ".");
    Header header{};
    header[0] = kVariants[0].magic;
    header[1] = kVariants[0].version;
    header[2] = static_cast<std::int32_t>(tokens.size());
    write_all(file.get(), header.data(), kHeaderBytes, temporary);
    write_all(file.get(), tokens.data(), tokens.size_bytes(), temporary);
    if (::fsync(file.get()) != 0) refuse(temporary, std::string("cannot be synced: ") + std::strerror(errno) + ".");
  }
  if (std::rename(temporary.c_str(), path.c_str()) != 0) {
    refuse(path, std::string("cannot be put in place: ") + std::strerror(errno) + ".");
  }
}

}  // namespace qe
