#include "kernels/wire/host_wait.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <thread>

#include "core/error.h"

namespace qe {
namespace {

// Within a step others answer in microseconds to milliseconds, and a nap would add to it; one that is late must not
// cost a core.
constexpr double kSpin_s = 1;
constexpr auto kNap = std::chrono::microseconds(200);
constexpr double kGap_s = 1;         // a process that runs looks again sooner
constexpr double kNoticed_s = 0.05;  // shorter waits are no news for the other ranks

}  // namespace

double Patience::seconds() noexcept {
  const auto now = Clock::now();
  seconds_ += std::min(std::chrono::duration<double>(now - last_).count(), kGap_s);
  last_ = now;
  return seconds_;
}

void Patience::reset() noexcept {
  last_ = Clock::now();
  seconds_ = 0;
}

void HostWait::look(double waited_s, const std::function<std::string()>& what,
                    const std::function<std::string()>& detail) const {
  JobBoard* board = rule_.board;
  const auto wait = [&] {
    char seconds[32];
    std::snprintf(seconds, sizeof seconds, "%.1f", waited_s);
    return "waits for " + what() + " since " + seconds + " s";
  };
  if (board != nullptr) {
    if (board->failure()) board->expect_no_failure(wait() + ", " + to_string(board->place()));
    if (waited_s > kNoticed_s) board->set_waiting(true);
  }
  if (waited_s <= rule_.timeout_s) return;
  std::string text = "rank " + std::to_string(rank_) + " " + wait() +
                     ", which is past the deadline; find out why the other rank is late, or raise runtime.timeout_s";
  if (board != nullptr) text += "\n  rank " + std::to_string(rank_) + " is " + to_string(board->place());
  if (detail) text += detail();
  if (board != nullptr) {
    text += "\n  " + board->slowest();
    if (rule_.ends_job) board->fail(static_cast<int>(ExitCode::kDevice), text);
  }
  throw DeviceError(text);
}

void HostWait::over() const noexcept {
  if (rule_.board != nullptr) rule_.board->set_waiting(false);
}

void HostWait::until(const std::function<bool()>& done, const std::function<std::string()>& what) const {
  if (done()) return;
  Patience patience;
  while (!done()) {
    const double waited = patience.seconds();
    look(waited, what);
    waited < kSpin_s ? std::this_thread::yield() : std::this_thread::sleep_for(kNap);
  }
  over();
}

}  // namespace qe
