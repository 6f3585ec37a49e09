// The host waits for another rank: until it is there, the deadline has passed, or a rank has failed.
#pragma once

#include <chrono>
#include <functional>
#include <string>

#include "kernels/wire/job_board.h"

namespace qe {

// When a wait ends without what it waits for.
struct WaitRule {
  WaitRule(double deadline_s, JobBoard* ranks = nullptr, bool late_ends_job = true)
      : timeout_s(deadline_s), board(ranks), ends_job(late_ends_job) {}
  double timeout_s;
  JobBoard* board;  // may be null: then a failure elsewhere shows as a deadline
  bool ends_job;    // past the deadline the job has failed; else only this wait has
};

// How long a wait has lasted, without the time in which this very process did not run: when a batch system stops a
// whole job for an hour, nobody is late.
class Patience {
 public:
  double seconds() noexcept;  // looked at often: a gap is taken for a stop
  void reset() noexcept;      // something moved

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point last_ = Clock::now();
  double seconds_ = 0;
};

class HostWait {
 public:
  HostWait(int rank, const WaitRule& rule) : rank_(rank), rule_(rule) {}

  // Polls. Throws as look() does.
  void until(const std::function<bool()>& done, const std::function<std::string()>& what) const;

  // One look by who polls himself, at a wait that has lasted `waited_s`. Throws Error with the job's exit code when
  // another rank has failed, DeviceError past the deadline: this rank and where it is, what() it waits for, since when,
  // then detail(), then which rank is the slowest. Where that ends the job the board has told it.
  void look(double waited_s, const std::function<std::string()>& what,
            const std::function<std::string()>& detail = {}) const;
  void over() const noexcept;  // such a wait has ended, or something moved

 private:
  int rank_;
  WaitRule rule_;
};

}  // namespace qe
