#include "app/line_sink.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>

namespace qe {
namespace {

constexpr std::size_t kMostKept = std::size_t{1} << 20;
constexpr auto kLastWait = std::chrono::seconds(1);

// A second opening of the same pipe or terminal; a file never makes a writer wait, and its offset is shared.
int open_again(int descriptor) {
  struct stat about {};
  if (::fstat(descriptor, &about) != 0 || !(S_ISFIFO(about.st_mode) || ::isatty(descriptor) == 1)) return -1;
  const std::string path = "/proc/self/fd/" + std::to_string(descriptor);
  return ::open(path.c_str(), O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
}

}  // namespace

LineSink::LineSink(int descriptor) : own_(open_again(descriptor)), descriptor_(own_ < 0 ? descriptor : own_) {}

LineSink::~LineSink() {
  const auto until = std::chrono::steady_clock::now() + kLastWait;
  flush();
  while (!kept_.empty() && std::chrono::steady_clock::now() < until) {
    pollfd ready{descriptor_, POLLOUT, 0};
    (void)::poll(&ready, 1, 10);
    flush();
  }
  if (own_ >= 0) ::close(own_);
}

void LineSink::write(const std::string& line) {
  flush();
  if (kept_.size() > kMostKept) {
    ++left_out_;
    return;
  }
  if (left_out_ > 0) kept_ += "(" + std::to_string(left_out_) + " lines left out: they were not read in time)\n";
  left_out_ = 0;
  kept_ += line + "\n";
  flush();
}

void LineSink::flush() {
  std::size_t written = 0;
  while (written < kept_.size()) {
    const ssize_t n = ::write(descriptor_, kept_.data() + written, kept_.size() - written);
    if (n >= 0) {
      written += static_cast<std::size_t>(n);
    } else if (errno == EAGAIN) {
      break;
    } else if (errno != EINTR) {
      written = kept_.size();  // nobody reads any more
    }
  }
  kept_.erase(0, written);
}

}  // namespace qe
