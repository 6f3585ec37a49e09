#include "app/stop_signals.h"

#include <pthread.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>

namespace qe {
namespace {

constexpr std::chrono::seconds kSameRequest{1};
constexpr int kKilledBySignal = 128;  // what a shell reports

}  // namespace

StopSignals::StopSignals(bool stops) {
  ::sigemptyset(&signals_);
  ::sigaddset(&signals_, SIGUSR2);
  if (stops) {
    ::sigaddset(&signals_, SIGTERM);
    ::sigaddset(&signals_, SIGUSR1);
  }
  ::pthread_sigmask(SIG_BLOCK, &signals_, &before_);
  watcher_ = std::thread([this] { watch(); });
}

StopSignals::~StopSignals() {
  done_ = true;
  ::pthread_kill(watcher_.native_handle(), SIGUSR2);
  watcher_.join();
  ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

void StopSignals::set_status(const std::string& line) {
  const std::lock_guard lock(mutex_);
  status_ = line;
}

void StopSignals::watch() {
  std::chrono::steady_clock::time_point first;
  for (int signal = 0; ::sigwait(&signals_, &signal) == 0 && !done_;) {
    const auto now = std::chrono::steady_clock::now();
    if (signal == SIGUSR2) {
      const std::lock_guard lock(mutex_);
      std::fprintf(stderr, "qeffect: %s\n", status_.c_str());
    } else if (ending_) {
      continue;
    } else if (!stop_) {
      first = now;
      stop_ = true;
      std::fprintf(stderr, "qeffect: asked to stop; saving after this step. Ask again to end at once.\n");
    } else if (now - first >= kSameRequest) {
      std::fprintf(stderr, "qeffect: asked to stop again; ending without saving.\n");
      ::_exit(kKilledBySignal + signal);
    }
  }
}

}  // namespace qe
