// Signals of a run, each in a child process of its own.
#include "app/stop_signals.h"

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <functional>

#include "tests/catch.h"

namespace qe {
namespace {

using namespace std::chrono_literals;

bool waits_for(const std::function<bool()>& condition) {
  for (int i = 0; i < 500 && !condition(); ++i) std::this_thread::sleep_for(10ms);
  return condition();
}

// How the child ended: its exit code, or minus the signal that killed it.
int child(const std::function<int()>& body) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::signal(SIGTERM, SIG_DFL);  // Catch has its own idea
    ::_exit(body());
  }
  int status = 0;
  ::waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

}  // namespace

TEST_CASE("SIGTERM and SIGUSR1 ask for a stop; a repeat at once is the same request") {
  for (const int signal : {SIGTERM, SIGUSR1}) {
    CHECK(child([&] {
            StopSignals signals(true);
            if (signals.stop_requested()) return 1;
            ::kill(::getpid(), signal);
            if (!waits_for([&] { return signals.stop_requested(); })) return 2;
            ::kill(::getpid(), SIGTERM);
            std::this_thread::sleep_for(100ms);
            return 75;
          }) == 75);
  }
}

TEST_CASE("a second request ends the process at once") {
  CHECK(child([] {
          StopSignals signals(true);
          ::kill(::getpid(), SIGTERM);
          if (!waits_for([&] { return signals.stop_requested(); })) return 1;
          std::this_thread::sleep_for(1100ms);
          ::kill(::getpid(), SIGTERM);
          std::this_thread::sleep_for(10s);
          return 2;
        }) == 128 + SIGTERM);
}

TEST_CASE("SIGUSR2 changes nothing; without a folder for checkpoints SIGTERM kills as ever") {
  CHECK(child([] {
          StopSignals signals(true);
          signals.set_status("step 3 of 7 is done");
          ::kill(::getpid(), SIGUSR2);
          std::this_thread::sleep_for(100ms);
          return signals.stop_requested() ? 1 : 0;
        }) == 0);
  CHECK(child([] {
          StopSignals signals(false);
          ::kill(::getpid(), SIGTERM);
          std::this_thread::sleep_for(10s);
          return 0;
        }) == -SIGTERM);
}

}  // namespace qe
