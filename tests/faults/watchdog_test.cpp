// The watchdog of a process, each time in a child of its own.
#include "app/watchdog.h"

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <functional>

#include "tests/catch.h"
#include "tests/faults/job.h"

namespace qe::testing {
namespace {

using namespace std::chrono_literals;

struct Ending {
  int code;  // minus the signal that killed it
  double seconds;
};
Ending child(const std::function<void()>& body) {
  const auto start = Clock::now();
  const pid_t pid = ::fork();
  if (pid == 0) {
    body();
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(pid, &status, 0);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status), seconds_since(start)};
}

[[noreturn]] void hang() {
  for (;;) std::this_thread::sleep_for(1s);
}

}  // namespace

TEST_CASE("a call past its limit ends the process with code 8; one within it does not") {
  CHECK(child([] {
          Watchdog watchdog(false);
          for (int i = 0; i < 3; ++i) {
            const Watchdog::Limit limit(watchdog, 0.4, "a call");
            std::this_thread::sleep_for(200ms);
          }
          std::this_thread::sleep_for(500ms);
          const Watchdog::Limit limit(watchdog, 0.1, "a call");
          hang();
        }).code == 8);
}

TEST_CASE("after a failure a process that hangs is ended with its code, within eleven seconds and not before ten",
          "[slow]") {
  const Ending own = child([] {
    Watchdog watchdog(false);
    watchdog.begin_abort(6);
    hang();
  });
  CHECK(own.code == 6);
  CHECK(own.seconds > 10);
  CHECK(own.seconds < 11);
  const Ending told = child([] {
    JobBoard board(0, [](const std::string& mine) { return std::vector{mine}; });
    Watchdog watchdog(false);
    watchdog.watch(&board);
    board.raise(4);
    hang();
  });
  CHECK(told.code == 4);
  CHECK(told.seconds < 11);
}

TEST_CASE("a rank whose launcher dies ends with code 8 within a second, also when it hangs") {
  std::array<int, 2> ends{};
  REQUIRE(::pipe(ends.data()) == 0);
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);  // the rank's end is seen here
  const pid_t launcher = ::fork();
  if (launcher == 0) {
    if (::fork() == 0) {
      Watchdog watchdog(true);
      const pid_t self = ::getpid();
      if (::write(ends[1], &self, sizeof self) == sizeof self) hang();
    }
    hang();
  }
  pid_t rank = 0;
  REQUIRE(::read(ends[0], &rank, sizeof rank) == sizeof rank);
  const auto start = Clock::now();
  ::kill(launcher, SIGKILL);
  ::waitpid(launcher, nullptr, 0);
  int status = 0;
  REQUIRE(::waitpid(rank, &status, 0) == rank);
  CHECK(WEXITSTATUS(status) == 8);
  CHECK(seconds_since(start) < 1);
}

}  // namespace qe::testing
