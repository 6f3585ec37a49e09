// A thread that ends this process when nothing else can: once the job's launcher is gone, some time after the job began
// to fail, or past the deadline of a call that cannot be left. It never touches MPI or a device, which may hang.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "core/error.h"
#include "kernels/wire/job_board.h"

namespace qe {

class Watchdog {
 public:
  // `under_launcher`: this process is a rank that a launcher started, and is not to outlive it. Made after StopSignals.
  explicit Watchdog(bool under_launcher);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  // From now on the ranks of the board's host are watched: one whose process is gone is the job's failure, and after a
  // failure this process has ten seconds to end by itself. Null: no more.
  void watch(JobBoard* board);
  // As after a failure.
  void begin_abort(int code);

  // While it lives, a call of a library that knows no deadline; past it the process ends with `code`. Without words
  // when `what` is empty: the job's failure has been told.
  class Limit {
   public:
    Limit(Watchdog&, double seconds, std::string what, ExitCode code = ExitCode::kDevice);
    ~Limit();
    Limit(const Limit&) = delete;
    Limit& operator=(const Limit&) = delete;

   private:
    Watchdog& watchdog_;
  };

 private:
  using Clock = std::chrono::steady_clock;
  struct Call {
    Clock::time_point since;
    double seconds;
    std::string what;
    ExitCode code;
  };
  void run();
  void forgive_stop();
  void look();
  void look_at_ranks();
  [[noreturn]] void end(int code, const std::string& why) const;

  int launcher_ = 0;  // 0: none
  std::uint64_t launcher_born_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  JobBoard* board_ = nullptr;
  std::optional<Call> call_;
  std::optional<Clock::time_point> failing_since_;
  Clock::time_point last_look_ = Clock::now();
  int code_ = 0;
  std::thread thread_;
};

}  // namespace qe
