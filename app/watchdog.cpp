#include "app/watchdog.h"

#include <pthread.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <utility>

#include "app/job.h"
#include "kernels/wire/process.h"

namespace qe {
namespace {

constexpr auto kLook = std::chrono::milliseconds(50);
constexpr auto kStop = std::chrono::seconds(1);  // no look for so long: the process was stopped
constexpr double kHardDeadline_s = 10;           // after a failure: a collective, MPI_Abort or a device may hang

double seconds_since(std::chrono::steady_clock::time_point t) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - t).count();
}

bool is_rank(int pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/environ", std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  const std::string environment = '\0' + text.str();
  for (const char* variable : {"OMPI_COMM_WORLD_RANK=", "PMI_RANK=", "PMIX_RANK="}) {
    if (environment.find('\0' + std::string(variable)) != std::string::npos) return true;
  }
  return false;
}

// The nearest process above that is not part of this rank, as a wrapper script is.
int find_launcher() {
  int pid = ::getppid();
  while (pid > 1 && is_rank(pid)) pid = parent_of(pid);
  return pid > 1 ? pid : 0;
}

}  // namespace

Watchdog::Watchdog(bool under_launcher) {
  if (under_launcher) {
    launcher_ = find_launcher();
    launcher_born_ = birth_of(launcher_).value_or(0);
    if (launcher_born_ == 0) launcher_ = 0;  // not visible here
  }
  // Signals are for the other threads; a pipe that the launcher left behind must not kill before the end is told.
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_BLOCK, &all, &before);
  thread_ = std::thread([this] { run(); });
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(mutex_);
    done_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Watchdog::watch(JobBoard* board) {
  const std::lock_guard lock(mutex_);
  board_ = board;
  if (board_ != nullptr) board_->tick();
}

void Watchdog::begin_abort(int code) {
  const std::lock_guard lock(mutex_);
  if (failing_since_) return;
  failing_since_ = Clock::now();
  code_ = code;
}

Watchdog::Limit::Limit(Watchdog& watchdog, double seconds, std::string what, ExitCode code) : watchdog_(watchdog) {
  const std::lock_guard lock(watchdog_.mutex_);
  watchdog_.call_ = Call{Clock::now(), seconds, std::move(what), code};
}

Watchdog::Limit::~Limit() {
  const std::lock_guard lock(watchdog_.mutex_);
  watchdog_.call_.reset();
}

void Watchdog::run() {
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kLook, [this] { return done_; })) look();
}

// Time in which this process did not run is nobody's fault.
void Watchdog::forgive_stop() {
  const auto now = Clock::now(), last = std::exchange(last_look_, now);
  if (now - last < kStop) return;
  if (call_) call_->since += now - last;
  if (failing_since_) *failing_since_ += now - last;
}

void Watchdog::look() {
  forgive_stop();
  constexpr int kCode = static_cast<int>(ExitCode::kDevice);
  if (launcher_ != 0 && birth_of(launcher_) != launcher_born_) {
    if (board_ != nullptr) board_->raise(kCode);
    end(kCode, "the launcher, process " + std::to_string(launcher_) + ", is gone, and the job ends with it.");
  }
  if (board_ != nullptr) look_at_ranks();
  if (failing_since_ && seconds_since(*failing_since_) > kHardDeadline_s) {
    end(code_, "is ended: the job failed and this rank did not end by itself.");
  }
  if (call_ && seconds_since(call_->since) > call_->seconds) {
    if (board_ != nullptr) board_->raise(kCode);
    char seconds[32];
    std::snprintf(seconds, sizeof seconds, "%g", call_->seconds);
    end(static_cast<int>(call_->code), call_->what.empty()
                                           ? ""
                                           : call_->what + " takes longer than the deadline of " + seconds +
                                                 " s; find out which rank is missing, or raise runtime.timeout_s.");
  }
}

void Watchdog::look_at_ranks() {
  board_->tick();
  if (const auto gone = board_->find_gone()) {
    print_error(board_->describe(*gone) + ", died: its process is gone. The job ends.");
  }
  if (const auto failed = board_->failure(); failed && !failing_since_) {
    failing_since_ = Clock::now();
    code_ = failed->code;
  }
}

void Watchdog::end(int code, const std::string& why) const {
  if (!why.empty()) print_error((board_ == nullptr ? "" : "rank " + std::to_string(board_->rank()) + ": ") + why);
  if (board_ != nullptr) board_->end_stopped();
  ::_exit(code);
}

}  // namespace qe
