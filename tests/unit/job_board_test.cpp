// What ranks see of each other through shared memory, with a forked process as the other rank.
#include "kernels/wire/job_board.h"

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "kernels/wire/host_wait.h"
#include "tests/catch.h"

namespace qe {
namespace {

using namespace std::chrono_literals;

// Texts of two processes over a socket, in rank order.
JobBoard::Exchange over(int socket, int rank) {
  return [socket, rank](const std::string& mine) {
    const std::uint64_t size = mine.size();
    std::uint64_t other_size = 0;
    if (::write(socket, &size, sizeof size) < 0 || ::write(socket, mine.data(), size) < 0) ::_exit(99);
    if (::read(socket, &other_size, sizeof other_size) != sizeof other_size) ::_exit(99);
    std::string other(other_size, '\0');
    if (other_size > 0 && ::read(socket, other.data(), other_size) < 0) ::_exit(99);
    return rank == 0 ? std::vector{mine, other} : std::vector{other, mine};
  };
}

// Rank 1, a process of its own that does `body` and then sleeps.
class OtherRank {
 public:
  explicit OtherRank(const std::function<void(JobBoard&)>& body) {
    std::array<int, 2> ends{};
    REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()) == 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      JobBoard board(1, over(ends[1], 1));
      body(board);
      const char done = 1;
      if (::write(ends[1], &done, 1) == 1) {
        for (;;) board.tick(), std::this_thread::sleep_for(10ms);
      }
      ::_exit(0);
    }
    board_.emplace(0, over(ends[0], 0));
    char done = 0;
    REQUIRE(::read(ends[0], &done, 1) == 1);
    ::close(ends[0]);
    ::close(ends[1]);
  }
  ~OtherRank() { end(); }
  void end() {
    if (pid_ == 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(std::exchange(pid_, 0), nullptr, 0);
  }
  [[nodiscard]] pid_t pid() const { return pid_; }
  JobBoard& mine() { return *board_; }

 private:
  pid_t pid_ = 0;
  std::optional<JobBoard> board_;
};

const Place kAtI{Phase::kAction, 3, parse_action("1I7")};

}  // namespace

TEST_CASE("a rank whose process is gone is found once, is named with its place, and ends every wait with code 8") {
  OtherRank other([](JobBoard& board) { board.set_place(kAtI); });
  CHECK(!other.mine().find_gone());
  CHECK_NOTHROW(other.mine().expect_no_failure());
  const std::string name = "rank 1 (process " + std::to_string(other.pid()) + "), in step 3 at 1I7";
  other.end();
  CHECK(other.mine().find_gone() == 1);
  CHECK(!other.mine().find_gone());
  CHECK(other.mine().describe(1) == name);
  try {
    other.mine().expect_no_failure("waits for 0RECV_B7");
    FAIL("no failure");
  } catch (const Error& e) {
    CHECK(e.exit_code() == ExitCode::kDevice);
    CHECK(std::string(e.what()) == "rank 0 stops because rank 1 died; it waits for 0RECV_B7");
  }
}

TEST_CASE("a process that has not been reaped by its launcher counts as gone; one that left does not") {
  OtherRank zombie([](JobBoard&) {});
  ::kill(zombie.pid(), SIGKILL);
  siginfo_t info;
  ::waitid(P_PID, static_cast<id_t>(zombie.pid()), &info, WEXITED | WNOWAIT);
  CHECK(zombie.mine().find_gone() == 1);
  OtherRank leaving([](JobBoard& board) { board.leave(); });
  CHECK(leaving.mine().others_left());
  leaving.end();
  CHECK(!leaving.mine().find_gone());
}

TEST_CASE("the first failure stays, with its own exit code, and the rank that raised it is not stopped by it") {
  OtherRank other([](JobBoard& board) { board.raise(6); });
  other.mine().raise(1);
  REQUIRE(other.mine().failure());
  CHECK(other.mine().failure()->rank == 1);
  CHECK(other.mine().failure()->code == 6);
  CHECK_THROWS_WITH(other.mine().expect_no_failure(), ContainsSubstring("rank 1 failed; its message says why"));
  other.end();
  CHECK_THROWS_WITH(other.mine().expect_no_failure(), ContainsSubstring("rank 1 failed"));
  OtherRank fine([](JobBoard&) {});
  fine.mine().raise(4);
  CHECK_NOTHROW(fine.mine().expect_no_failure());
}

TEST_CASE(
    "a failure is told once, when it is noticed: a wait past its deadline has told before anything is taken down") {
  std::vector<std::string> told;
  JobBoard board(
      0, [](const std::string& mine) { return std::vector{mine}; },
      [&](const std::string& message) { told.push_back(message); });
  const HostWait wait(0, {0.05, &board});
  struct TornDown {
    ~TornDown() { told_before = told.size(); }
    const std::vector<std::string>& told;
    std::size_t& told_before;
  };
  std::size_t told_before = 0;
  std::string thrown;
  try {
    const TornDown resource{told, told_before};
    wait.until([] { return false; }, [] { return "a message"; });
  } catch (const DeviceError& e) {
    thrown = e.what();
  }
  CHECK(told_before == 1);
  CHECK(told == std::vector{thrown});
  CHECK_THAT(thrown, ContainsSubstring("rank 0 waits for a message since"));
  REQUIRE(board.failure());
  CHECK(board.failure()->code == static_cast<int>(ExitCode::kDevice));
  CHECK(board.all_told());
  board.fail(1, "later");
  CHECK(told.size() == 1);
  CHECK(board.failure()->code == static_cast<int>(ExitCode::kDevice));
}

TEST_CASE(
    "the slowest rank is the one that waits for nobody, and before it one that is stopped; that one can be ended") {
  OtherRank other([](JobBoard& board) { board.set_place(kAtI); });
  other.mine().set_waiting(true);
  CHECK_THAT(other.mine().slowest(), ContainsSubstring("slowest: rank 1") && ContainsSubstring("in step 3 at 1I7") &&
                                         ContainsSubstring("waits for nobody"));
  OtherRank busy([](JobBoard& board) { board.set_waiting(true); });
  CHECK_THAT(busy.mine().slowest(), ContainsSubstring("slowest: rank 0"));
  ::kill(other.pid(), SIGSTOP);
  other.mine().end_stopped();  // not yet: it ran a moment ago
  std::this_thread::sleep_for(2200ms);
  CHECK_THAT(other.mine().slowest(), ContainsSubstring("slowest: rank 1") && ContainsSubstring("it is stopped"));
  other.mine().end_stopped();
  int status = 0;
  ::waitpid(other.pid(), &status, 0);
  CHECK(WTERMSIG(status) == SIGKILL);
}

TEST_CASE("places read as a user would say them, for every action") {
  CHECK(to_string(Place{}) == "starting");
  CHECK(to_string(Place{Phase::kSave, 4, {}}) == "saving after step 4");
  JobBoard board(0, [](const std::string& mine) { return std::vector{mine}; });
  for (const char* action : {"0F0", "65535I99999", "3REDUCE_GRAD", "2SEND_B4", "1W2"}) {
    board.set_place({Phase::kAction, 4000000000U, parse_action(action)});
    CHECK(to_string(board.place()) == "in step 4000000000 at " + std::string(action));
  }
}

}  // namespace qe
