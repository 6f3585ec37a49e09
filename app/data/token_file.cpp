#include "app/data/token_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <limits>
#include <vector>

#include "core/error.h"

namespace qe {
namespace {

static_assert(std::endian::native == std::endian::little, "token shards are read as they lie");

constexpr std::size_t kHeaderBytes = 1024;
constexpr std::int64_t kScanBlock = 1 << 18;  // tokens read at a time by the check of all of them
constexpr const char* kSetVocabulary = "; set model.vocab_size to the tokenizer's.";
constexpr const char* kChanged = "; the file has changed since the run began.";

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

Header read_header(const std::string& path, const RegularFile& file) {
  if (file.failure().starts_with("is a directory")) {
    refuse(path, file.failure() + "; name its files, as in " + path + "/*.bin.");
  }
  if (file.failure().starts_with("is not a regular")) refuse(path, file.failure() + "; copy what it gives to one.");
  if (!file.failure().empty()) refuse(path, file.failure() + ".");
  if (file.size() == 0) refuse(path, "is empty, wanted a header of 1024 bytes and tokens.");
  if (file.size() < kHeaderBytes) {
    refuse(path, "has " + str(static_cast<std::int64_t>(file.size())) + " bytes, wanted a header of 1024 and tokens.");
  }
  Header header{};
  if (file.read(0, header.data(), kHeaderBytes) != kHeaderBytes) {
    refuse(path, std::string("cannot be read: ") + std::strerror(errno) + ".");
  }
  return header;
}

// A loop without an early end, so that it vectorises.
std::uint32_t largest_of(std::span<const std::uint32_t> ids) {
  std::uint32_t largest = 0;
  for (const std::uint32_t id : ids) largest = std::max(largest, id);
  return largest;
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
    if (done < 0) refuse(path, std::string("cannot be written: ") + std::strerror(errno) + ".");
    at += done;
    bytes -= static_cast<std::size_t>(done);
  }
}

}  // namespace

TokenFile::TokenFile(const std::string& path, int vocab_size)
    : path_(path), file_(path), vocab_size_(static_cast<std::uint32_t>(vocab_size)) {
  const Header header = read_header(path, file_);
  const Variant& variant = identify(path, header);
  if (header[2] < 0) refuse(path, "has a token count of " + str(header[2]) + " in its header; it is damaged.");
  const std::size_t wanted = kHeaderBytes + static_cast<std::size_t>(header[2]) * variant.bytes_per_token;
  if (file_.size() != wanted) {
    refuse(path, "has " + str(static_cast<std::int64_t>(file_.size())) + " bytes, wanted " +
                     str(static_cast<std::int64_t>(wanted)) + " for the " + str(header[2]) +
                     " tokens in its header; it is " +
                     (file_.size() < wanted ? "cut short." : "longer than its header says."));
  }
  if (header[2] == 0) refuse(path, "holds no tokens; leave it out.");
  count_ = header[2];
  bytes_per_token_ = variant.bytes_per_token;
  std::vector<std::int32_t> block(static_cast<std::size_t>(std::min(kScanBlock, count_)));
  for (std::int64_t first = 0; first < count_; first += kScanBlock) {
    const auto n = static_cast<std::size_t>(std::min(kScanBlock, count_ - first));
    read_tokens(first, std::span(block).first(n), kSetVocabulary);
  }
}

void TokenFile::refuse_id(std::uint32_t id, std::int64_t at, const char* advice) const {
  refuse(path_, "has id " + str(id) + " at token " + str(at) + " (byte " +
                    str(static_cast<std::int64_t>(kHeaderBytes) + at * bytes_per_token_) +
                    "), wanted ids below model.vocab_size " + str(vocab_size_) + advice);
}

void TokenFile::read(std::int64_t first, std::span<std::int32_t> out) const { read_tokens(first, out, kChanged); }

void TokenFile::read_tokens(std::int64_t first, std::span<std::int32_t> out, const char* advice) const {
  QE_EXPECTS(first >= 0 && first + std::ssize(out) <= count_, "a read stays inside its token file");
  // Two-byte tokens are read into the upper half of `out` and widened from there, from the lowest on.
  const std::size_t bytes = out.size() * static_cast<std::size_t>(bytes_per_token_);
  auto* raw = reinterpret_cast<unsigned char*>(out.data()) + (out.size_bytes() - bytes);
  const std::uint64_t offset = kHeaderBytes + static_cast<std::uint64_t>(first * bytes_per_token_);
  const auto done = file_.read(offset, raw, bytes);
  if (!done) refuse(path_, std::string("cannot be read: ") + std::strerror(errno) + ".");
  if (*done < bytes) {
    refuse(path_, "ends at byte " + str(static_cast<std::int64_t>(offset + *done)) + ", wanted the tokens " +
                      str(first) + " to " + str(first + std::ssize(out) - 1) + kChanged);
  }
  if (bytes_per_token_ == 2) {
    for (std::int32_t& to : out) {
      std::uint16_t token = 0;
      std::memcpy(&token, raw, sizeof token);
      raw += sizeof token;
      to = token;
    }
  }
  const std::span ids(reinterpret_cast<const std::uint32_t*>(out.data()), out.size());
  if (largest_of(ids) < vocab_size_) return;
  const auto bad = std::find_if(ids.begin(), ids.end(), [this](std::uint32_t id) { return id >= vocab_size_; });
  refuse_id(*bad, first + (bad - ids.begin()), advice);
}

void write_token_file(const std::string& path, std::span<const std::uint16_t> tokens) {
  if (tokens.size() > std::numeric_limits<std::int32_t>::max()) {
    refuse(path, "would hold " + str(std::ssize(tokens)) + " tokens, at most 2147483647 fit; split the input.");
  }
  const std::string temporary = path + ".tmp";
  const Descriptor file(temporary, O_WRONLY | O_CREAT | O_TRUNC);
  if (!file.is_open()) {
    refuse(path, std::string("cannot be created: ") + std::strerror(errno) + "; name one in a folder that exists.");
  }
  try {
    Header header{};
    header[0] = kVariants[0].magic;
    header[1] = kVariants[0].version;
    header[2] = static_cast<std::int32_t>(tokens.size());
    write_all(file.get(), header.data(), kHeaderBytes, path);
    write_all(file.get(), tokens.data(), tokens.size_bytes(), path);
    if (::fsync(file.get()) != 0) refuse(path, std::string("cannot be synced: ") + std::strerror(errno) + ".");
    if (std::rename(temporary.c_str(), path.c_str()) != 0) {
      refuse(path, std::string("cannot be put in place: ") + std::strerror(errno) + ".");
    }
  } catch (...) {
    ::unlink(temporary.c_str());
    throw;
  }
}

}  // namespace qe
