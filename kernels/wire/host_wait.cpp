#include "kernels/wire/host_wait.h"

#include <chrono>
#include <cstdio>
#include <thread>
#include <utility>

#include "core/error.h"

namespace qe {
namespace {

// Within a step others answer in microseconds to milliseconds, and a nap would add to it; one that is late must not
// cost a core.
constexpr double kSpin_s = 1;
constexpr auto kNap = std::chrono::microseconds(200);

}  // namespace

HostWait::HostWait(int rank, double timeout_s, std::function<void()> expect_no_failure)
    : rank_(rank), timeout_s_(timeout_s), expect_no_failure_(std::move(expect_no_failure)) {}

void HostWait::until(const std::function<bool()>& done, const std::function<std::string()>& what) const {
  if (done()) return;
  const auto since = std::chrono::steady_clock::now();
  while (!done()) {
    if (expect_no_failure_) expect_no_failure_();
    const double waited = std::chrono::duration<double>(std::chrono::steady_clock::now() - since).count();
    if (waited > timeout_s_) {
      char seconds[32];
      std::snprintf(seconds, sizeof seconds, "%.1f", waited);
      throw DeviceError("rank " + std::to_string(rank_) + " waits for " + what() + " since " + seconds +
                        " s, which is past the deadline; find out why the other rank is late, or raise "
                        "runtime.timeout_s");
    }
    waited < kSpin_s ? std::this_thread::yield() : std::this_thread::sleep_for(kNap);
  }
}

}  // namespace qe
