#include "kernels/wire/job_board.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>

#include "core/error.h"
#include "kernels/wire/process.h"

namespace qe {

// All zero when made. `place` packs a Place into one word, so that no reader sees half of one.
struct JobBoard::Row {
  enum State : int { kAbsent, kAtWork, kTold, kLeft };
  std::atomic<int> pid;
  std::atomic<std::uint64_t> born;
  std::atomic<int> state;
  std::atomic<bool> waits;
  std::atomic<std::uint32_t> step;
  std::atomic<std::uint64_t> place;
  std::atomic<std::int64_t> ticked, moved;  // nanoseconds of the host's steady clock
};
struct JobBoard::Page {
  std::atomic<std::uint64_t> failed;  // 0: nothing, else a Failure
  // A Row of each rank follows.
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "processes share it");

namespace {

constexpr double kStopped_s = 2;  // a process that has not ticked for so long is stopped, or gets no time

std::int64_t now() noexcept { return std::chrono::steady_clock::now().time_since_epoch().count(); }
double seconds_since(std::int64_t t) noexcept { return static_cast<double>(now() - t) * 1e-9; }

// Unique on the host: no two processes share a number, and no process makes two pages in one nanosecond.
std::string fresh_name() { return "/qeffect-" + std::to_string(::getpid()) + "-" + std::to_string(now()); }

std::uint64_t pack(const Place& p) noexcept {
  return static_cast<std::uint64_t>(p.phase) << 56 | static_cast<std::uint64_t>(p.action.kind) << 48 |
         static_cast<std::uint64_t>(to_int(p.action.stage) & 0xffff) << 32 |
         static_cast<std::uint32_t>(to_int(p.action.microbatch));
}
Place unpack(std::uint32_t step, std::uint64_t word) noexcept {
  return {static_cast<Phase>(word >> 56), step,
          Action{static_cast<ActionKind>(word >> 48 & 0xff), StageIndex{static_cast<int>(word >> 32 & 0xffff)},
                 MicrobatchIndex{static_cast<int>(word & 0xffffffff)}}};
}

constexpr std::uint64_t kDied = std::uint64_t{1} << 63;
std::uint64_t pack(const JobBoard::Failure& f) noexcept {
  return (f.died ? kDied : 0) | static_cast<std::uint64_t>(f.code) << 32 | static_cast<std::uint32_t>(f.rank + 1);
}

std::string seconds(double s) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", s);
  return text;
}

}  // namespace

std::string to_string(const Place& p) {
  const std::string step = "step " + std::to_string(p.step);
  switch (p.phase) {
    case Phase::kStart:
      return "starting";
    case Phase::kStep:
      return "in " + step;
    case Phase::kAction:
      return "in " + step + " at " + to_string(p.action);
    case Phase::kOptimizer:
      return "in " + step + " at the optimizer";
    case Phase::kEvaluation:
      return "evaluating after " + step;
    case Phase::kSave:
      return "saving after " + step;
    case Phase::kEnd:
      return "at the end of the run";
  }
  return "?";
}

JobBoard::JobBoard(int rank, const Exchange& exchange, Tell tell) : rank_(rank), tell_(std::move(tell)) {
  const std::vector<std::string> hosts = exchange(host_name());
  ranks_ = static_cast<int>(hosts.size());
  for (int r = 0; r < ranks_; ++r) {
    const std::string& host = hosts[static_cast<std::size_t>(r)];
    if (host == hosts[static_cast<std::size_t>(rank)]) here_.push_back(r);
    if (host != hosts.front() && other_host_.empty()) {
      other_host_ = "rank 0 is on " + hosts.front() + " and rank " + std::to_string(r) + " on " + host;
    }
  }
  const bool leads = here_.front() == rank;
  std::string name = leads ? fresh_name() : "", fault;
  void* page = leads ? share(name, true, fault) : nullptr;
  const std::vector<std::string> names = exchange(name);
  const std::string& shared = names[static_cast<std::size_t>(here_.front())];
  if (!leads) page = share(shared, false, fault);
  page_ = static_cast<Page*>(page);
  if (page_ != nullptr) {
    Row& mine = row(rank_);
    mine.pid = ::getpid();
    mine.born = birth_of(::getpid()).value_or(0);
    mine.state = Row::kAtWork;
    mine.moved = now();
  }
  const std::vector<std::string> faults = exchange(fault);
  if (leads && page != nullptr) ::shm_unlink(name.c_str());  // everyone who can has it open
  for (std::size_t r = 0; r < faults.size(); ++r) {
    if (faults[r].empty()) continue;
    if (page != nullptr) ::munmap(page, sizeof(Page) + static_cast<std::size_t>(ranks_) * sizeof(Row));
    throw DeviceError("rank " + std::to_string(r) + " cannot share memory with the ranks of its host (" + faults[r] +
                      "); make /dev/shm writable");
  }
  // Processes that this one cannot see, as in another container, are not judged.
  std::erase_if(here_, [&](int r) { return birth_of(row(r).pid) != row(r).born.load(); });
}

JobBoard::~JobBoard() { ::munmap(page_, sizeof(Page) + static_cast<std::size_t>(ranks_) * sizeof(Row)); }

// A rank that is alone on its host needs nothing to be shared.
void* JobBoard::share(const std::string& name, bool creates, std::string& fault) const {
  const std::size_t bytes = sizeof(Page) + static_cast<std::size_t>(ranks_) * sizeof(Row);
  if (here_.size() == 1) {
    void* own = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (own == MAP_FAILED) fault = std::strerror(errno);
    return own == MAP_FAILED ? nullptr : own;
  }
  const int file = ::shm_open(name.c_str(), creates ? O_CREAT | O_EXCL | O_RDWR : O_RDWR, 0600);
  void* page = MAP_FAILED;
  if (file >= 0 && (!creates || ::ftruncate(file, static_cast<off_t>(bytes)) == 0)) {
    page = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  }
  if (page == MAP_FAILED) fault = std::strerror(errno);
  if (file >= 0) ::close(file);
  return page == MAP_FAILED ? nullptr : page;
}

JobBoard::Row& JobBoard::row(int rank) const noexcept { return reinterpret_cast<Row*>(page_ + 1)[rank]; }

void JobBoard::set_place(const Place& place) noexcept {
  Row& mine = row(rank_);
  mine.step.store(place.step, std::memory_order_relaxed);
  mine.place.store(pack(place), std::memory_order_relaxed);
  mine.moved.store(now(), std::memory_order_relaxed);
}

Place JobBoard::place() const noexcept { return unpack(row(rank_).step, row(rank_).place); }

void JobBoard::set_waiting(bool waits) noexcept {
  if (row(rank_).waits.exchange(waits, std::memory_order_relaxed) == waits) return;
  row(rank_).moved.store(now(), std::memory_order_relaxed);
}

void JobBoard::tick() noexcept { row(rank_).ticked.store(now(), std::memory_order_relaxed); }
void JobBoard::leave() noexcept { row(rank_).state = Row::kLeft; }
void JobBoard::raise(int code) noexcept {
  std::uint64_t none = 0;
  page_->failed.compare_exchange_strong(none, pack(Failure{rank_, code, false}), std::memory_order_acq_rel);
}

void JobBoard::fail(int code, const std::string& message) {
  raise(code);
  if (told_.exchange(true)) return;
  if (tell_) tell_(message);
  row(rank_).state = Row::kTold;
}

std::optional<JobBoard::Failure> JobBoard::failure() const noexcept {
  const std::uint64_t failed = page_->failed.load(std::memory_order_acquire);
  if (failed == 0) return std::nullopt;
  return Failure{static_cast<int>(failed & 0xffffffff) - 1, static_cast<int>(failed >> 32 & 0xff),
                 (failed & kDied) != 0};
}

void JobBoard::expect_no_failure(const std::string& waited_for) const {
  const auto failed = failure();
  if (!failed || failed->rank == rank_) return;
  throw Error(static_cast<ExitCode>(failed->code), "rank " + std::to_string(rank_) + " stops because rank " +
                                                       std::to_string(failed->rank) +
                                                       (failed->died ? " died" : " failed; its message says why") +
                                                       (waited_for.empty() ? "" : "; it " + waited_for));
}

bool JobBoard::is_gone(int rank) const noexcept {
  const int pid = row(rank).pid;
  return pid != 0 && row(rank).born != 0 && birth_of(pid) != row(rank).born.load();
}

std::optional<int> JobBoard::find_gone() noexcept {
  for (const int r : here_) {
    if (r == rank_ || row(r).state != Row::kAtWork || !is_gone(r) || row(r).state != Row::kAtWork) continue;
    std::uint64_t none = 0;
    const Failure died{r, static_cast<int>(ExitCode::kDevice), true};
    if (page_->failed.compare_exchange_strong(none, pack(died), std::memory_order_acq_rel)) return r;
    return std::nullopt;
  }
  return std::nullopt;
}

std::string JobBoard::describe(int rank) const {
  const Row& r = row(rank);
  return "rank " + std::to_string(rank) + " (process " + std::to_string(r.pid) + "), " +
         to_string(unpack(r.step, r.place));
}

double JobBoard::silent_s(int rank) const noexcept {
  const std::int64_t ticked = row(rank).ticked;
  return ticked == 0 ? 0 : seconds_since(ticked);
}

// Whose process is stopped comes before who is busy; of several the one that has been so for longest. A rank that waits
// is late because of another.
std::string JobBoard::slowest() const {
  int stopped = -1, busy = -1;
  for (const int r : here_) {
    if (row(r).state == Row::kLeft) continue;
    if (silent_s(r) > kStopped_s && (stopped < 0 || silent_s(r) > silent_s(stopped))) stopped = r;
    if (!row(r).waits && (busy < 0 || row(r).moved < row(busy).moved)) busy = r;
  }
  if (stopped >= 0) {
    return "slowest: " + describe(stopped) + ", whose process has not run for " + seconds(silent_s(stopped)) +
           (is_gone(stopped) ? ": it is gone" : ": it is stopped, or its host gives it no time");
  }
  if (busy >= 0) {
    return "slowest: " + describe(busy) + ", which waits for nobody and has not moved for " +
           seconds(seconds_since(row(busy).moved));
  }
  return other_host_.empty() ? "slowest: unknown, every rank waits for another"
                             : "slowest: a rank of another host, every rank of this one waits";
}

bool JobBoard::all_told() const noexcept {
  return std::all_of(here_.begin(), here_.end(), [&](int r) {
    return row(r).state == Row::kTold || row(r).state == Row::kLeft || silent_s(r) > kStopped_s || is_gone(r);
  });
}

bool JobBoard::others_left() const noexcept {
  return std::all_of(here_.begin(), here_.end(), [&](int r) { return r == rank_ || row(r).state == Row::kLeft; });
}

void JobBoard::end_stopped() noexcept {
  for (const int r : here_) {
    if (r != rank_ && silent_s(r) > kStopped_s && row(r).born != 0 && !is_gone(r)) ::kill(row(r).pid, SIGKILL);
  }
}

}  // namespace qe
