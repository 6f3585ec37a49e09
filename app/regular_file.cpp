#include "app/regular_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace qe {
namespace {

constexpr std::size_t kBlock = 1 << 20;

std::string refusal_of(mode_t mode) {
  if (S_ISREG(mode)) return "";
  if (S_ISDIR(mode)) return "is a directory, wanted a file";
  return "is not a regular file";
}

}  // namespace

RegularFile::RegularFile(const std::string& path) {
  // Looked at before it is opened, since opening some devices has an effect; without O_NONBLOCK a FIFO that takes the
  // file's place in between would wait for a writer.
  struct stat info {};
  if (::stat(path.c_str(), &info) == 0) failure_ = refusal_of(info.st_mode);
  if (!failure_.empty()) return;
  descriptor_ = ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  if (descriptor_ < 0 || ::fstat(descriptor_, &info) != 0) {
    failure_ = std::string("cannot be opened: ") + std::strerror(errno);
    if (errno == EMFILE) failure_ += ", raise the limit with ulimit -n";
    return;
  }
  failure_ = refusal_of(info.st_mode);
  size_ = static_cast<std::size_t>(info.st_size);
}

RegularFile::~RegularFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

RegularFile::RegularFile(RegularFile&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)), size_(other.size_), failure_(std::move(other.failure_)) {}

std::optional<std::size_t> RegularFile::read(std::uint64_t offset, void* to, std::size_t bytes) const {
  std::size_t done = 0;
  while (done < bytes) {
    const ssize_t n =
        ::pread(descriptor_, static_cast<char*>(to) + done, bytes - done, static_cast<off_t>(offset + done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return std::nullopt;
    if (n == 0) break;
    done += static_cast<std::size_t>(n);
  }
  return done;
}

std::optional<std::string> RegularFile::read_all() const {
  std::string text;
  for (;;) {
    const std::size_t before = text.size();
    text.resize(before + kBlock);
    const auto n = read(before, text.data() + before, kBlock);
    if (!n) return std::nullopt;
    text.resize(before + *n);
    if (*n < kBlock) return text;
  }
}

}  // namespace qe
