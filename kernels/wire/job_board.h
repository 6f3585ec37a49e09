// What the ranks of one host know of each other without messages: memory that all of them share, a row a rank. Says who
// failed, whose process is gone or stopped, and where each of them is. Who acts on it: waits (host_wait.h), which end
// at once when a rank has failed, and the watchdog of a process (app/watchdog.h).
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/action.h"

namespace qe {

enum class Phase : std::uint8_t { kStart, kStep, kAction, kOptimizer, kEvaluation, kSave, kEnd };

// Where a rank is. `step` is the optimizer step, from 1; the action counts in kAction only.
struct Place {
  Phase phase = Phase::kStart;
  std::uint32_t step = 0;
  Action action{};
};
std::string to_string(const Place&);  // "in step 3 at 1I0", "saving after step 4"

class JobBoard {
 public:
  // Every rank's text on every rank, in rank order; collective and under a deadline.
  using Exchange = std::function<std::vector<std::string>(const std::string& mine)>;
  using Tell = std::function<void(const std::string& message)>;
  // Collective over the world. DeviceError, on every rank alike, where ranks of a host cannot share memory. `tell`
  // prints why this rank failed; any of its threads, once.
  JobBoard(int rank, const Exchange&, Tell tell = {});
  ~JobBoard();
  JobBoard(const JobBoard&) = delete;
  JobBoard& operator=(const JobBoard&) = delete;

  [[nodiscard]] int rank() const noexcept { return rank_; }
  // Empty: all ranks are here. Else two hosts with a rank of each, for a message.
  [[nodiscard]] const std::string& other_host() const noexcept { return other_host_; }

  // This rank, as it goes on. Lock-free; any of its threads.
  void set_place(const Place&) noexcept;
  [[nodiscard]] Place place() const noexcept;
  void set_waiting(bool) noexcept;  // for another rank
  void tick() noexcept;             // the process runs
  void leave() noexcept;            // it has nothing more to do for the others: its end is no failure

  // This rank failed, and the job ends with `code`. The first to fail stays.
  void raise(int code) noexcept;
  // The same, and tells why, unless this rank has told already. For whoever notices a failure, before anything is taken
  // down: that may hang, and then the process is ended.
  void fail(int code, const std::string& message);
  struct Failure {
    int rank, code;
    bool died;  // its process is gone, and it could not say why
  };
  [[nodiscard]] std::optional<Failure> failure() const noexcept;
  // Throws Error with the failure's code when another rank failed: that rank, and what this one waited for.
  void expect_no_failure(const std::string& waited_for = "") const;

  // A rank of this host whose process is gone although it neither left nor failed. It is now the job's failure; told to
  // one caller of all ranks only.
  [[nodiscard]] std::optional<int> find_gone() noexcept;
  // "rank 2 (process 4711)" and its place.
  [[nodiscard]] std::string describe(int rank) const;
  // Which rank of this host keeps the others waiting, and why that is thought; a sentence.
  [[nodiscard]] std::string slowest() const;
  // Every rank of this host that runs has told why it ends, or has left.
  [[nodiscard]] bool all_told() const noexcept;
  // Every other rank of this host has left.
  [[nodiscard]] bool others_left() const noexcept;
  // Kills the ranks of this host that are stopped: they cannot end by themselves.
  void end_stopped() noexcept;

 private:
  struct Row;
  struct Page;
  [[nodiscard]] Row& row(int rank) const noexcept;
  [[nodiscard]] bool is_gone(int rank) const noexcept;
  [[nodiscard]] double silent_s(int rank) const noexcept;  // since its process ran last; 0 where it has no watchdog
  void* share(const std::string& name, bool creates, std::string& fault) const;

  int rank_;
  Tell tell_;
  std::atomic<bool> told_ = false;
  int ranks_ = 0;
  std::vector<int> here_;  // ranks of this host
  std::string other_host_;
  Page* page_ = nullptr;
};

}  // namespace qe
