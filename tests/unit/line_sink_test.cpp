// Lines to readers that keep up, that lag, and that are gone. A test that would wait for its reader never ends.
#include "app/line_sink.h"

#include <fcntl.h>
#include <stdlib.h>
#include <termios.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <string>
#include <vector>

#include "tests/catch.h"

namespace qe {
namespace {

struct Ends {
  int read = -1, write = -1;
  ~Ends() {
    ::close(read);
    ::close(write);
  }
};

void open_pipe(Ends& ends) {
  std::array<int, 2> both{};
  REQUIRE(::pipe(both.data()) == 0);
  ends.read = both[0], ends.write = both[1];
}

void open_terminal(Ends& ends) {
  ends.read = ::posix_openpt(O_RDWR | O_NOCTTY);
  REQUIRE(ends.read >= 0);
  REQUIRE(::grantpt(ends.read) == 0);
  REQUIRE(::unlockpt(ends.read) == 0);
  ends.write = ::open(::ptsname(ends.read), O_RDWR | O_NOCTTY);
  REQUIRE(ends.write >= 0);
  termios mode{};
  REQUIRE(::tcgetattr(ends.write, &mode) == 0);
  ::cfmakeraw(&mode);
  REQUIRE(::tcsetattr(ends.write, TCSANOW, &mode) == 0);
}

// What there is to read now.
std::string take(const Ends& ends) {
  (void)::fcntl(ends.read, F_SETFL, O_NONBLOCK);
  std::string text;
  std::array<char, 4096> part{};
  for (ssize_t n = 0; (n = ::read(ends.read, part.data(), part.size())) > 0;) {
    text.append(part.data(), static_cast<std::size_t>(n));
  }
  return text;
}

}  // namespace

TEST_CASE("a line is there when write returns, and the descriptor still blocks for others") {
  for (const auto& open : {open_pipe, open_terminal}) {
    Ends ends;
    open(ends);
    LineSink sink(ends.write);
    sink.write("one");
    sink.write("two");
    CHECK(take(ends) == "one\ntwo\n");
    CHECK((::fcntl(ends.write, F_GETFL) & O_NONBLOCK) == 0);
  }
}

TEST_CASE("a reader that lags stops nobody, and finds whole lines in order and how many were left out") {
  for (const auto& open : {open_pipe, open_terminal}) {
    Ends ends;
    open(ends);
    std::string text;
    {
      LineSink sink(ends.write);
      for (int i = 0; i < 200000; ++i) sink.write("line " + std::to_string(i));  // 2 MB
      while (text.find("left out") == std::string::npos) {
        text += take(ends);
        sink.write("read");
      }
    }
    text += take(ends);
    int next = 0;
    bool told = false;
    std::size_t at = 0;
    for (std::size_t end = 0; (end = text.find('\n', at)) != std::string::npos; at = end + 1) {
      const std::string line = text.substr(at, end - at);
      if (line == "line " + std::to_string(next))
        ++next;
      else if (line == "(" + std::to_string(200000 - next) + " lines left out: they were not read in time)")
        told = true;
      else if (line != "read")
        FAIL("a line that nobody wrote: " << line);
    }
    CHECK(next > 50000);
    CHECK(told);
    CHECK(at == text.size());
  }
}

TEST_CASE("a reader that is gone is nobody's error") {
  Ends ends;
  open_pipe(ends);
  const auto before = std::signal(SIGPIPE, SIG_IGN);
  LineSink sink(ends.write);
  sink.write("one");
  ::close(ends.read);
  ends.read = -1;
  for (int i = 0; i < 1000; ++i) sink.write("nobody reads this");
  std::signal(SIGPIPE, before);
  SUCCEED();
}

}  // namespace qe
