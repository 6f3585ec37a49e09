// Signals of a training run. A thread of its own waits for them, so that nothing runs inside a handler and no variable
// is global. Acting on them is the trainer's: at a step boundary, all ranks together.
#pragma once

#include <atomic>
#include <csignal>
#include <mutex>
#include <string>
#include <thread>

namespace qe {

class StopSignals {
 public:
  // From now on SIGUSR2 prints the status line; with `stops` SIGTERM and SIGUSR1 ask for a stop, and another one at
  // least a second later ends the process at once (a launcher and a batch system may both deliver the first). Made
  // before any other thread, which would take the signals otherwise.
  explicit StopSignals(bool stops);
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  [[nodiscard]] bool stop_requested() const noexcept { return stop_.load(); }
  void set_status(const std::string& line);
  // The run ends by itself: a launcher that ends the others asks in vain, and without a word.
  void ignore_requests() noexcept { ending_ = true; }

 private:
  void watch();

  sigset_t signals_{};
  sigset_t before_{};
  std::atomic<bool> stop_ = false, done_ = false, ending_ = false;
  std::mutex mutex_;
  std::string status_ = "no step is done yet";
  std::thread watcher_;
};

}  // namespace qe
