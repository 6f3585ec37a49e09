// A rank dies, stops or is late, or the launcher dies: the job ends in time, says who it was, and leaves nothing.
#include "tests/catch.h"
#include "tests/faults/job.h"

namespace qe::testing {
namespace {

constexpr double kDeadline_s = kTimeout_s + 30;

// Where a rank can be killed, and what the others say of it.
struct Moment {
  std::string fault, place;
};
std::vector<Moment> moments_of(int rank) {
  const std::string r = std::to_string(rank);
  std::vector<Moment> all;
  for (const char* action : {"F1", "I1", "W1", "REDUCE_GRAD"}) {
    all.push_back({"crash rank=" + r + " step=3 at=" + r + action, "in step 3 at " + r + action});
  }
  all.push_back({"crash rank=" + r + " step=3 at=optimizer", "in step 3 at the optimizer"});
  all.push_back(
      {"crash rank=" + r + " step=4 at=write byte=middle file=rank_0000" + r + ".safetensors", "saving after step 4"});
  return all;
}

void check_death(int rank, const Moment& moment, const std::string& launcher_options) {
  INFO(moment.fault << ", launcher " << launcher_options);
  const Job job;
  const auto start = Clock::now();
  const Outcome out = run(job.mpirun(job.train("", {moment.fault}), launcher_options));
  INFO(out.text);
  CHECK(seconds_since(start) < kDeadline_s);
  CHECK(job.ends_within(1));
  CHECK((out.code != 0 || !launcher_options.empty()));
  const std::string name = "qeffect: error: rank " + std::to_string(rank) + " (process ";
  CHECK(count(out.text, name) == 1);
  CHECK_THAT(out.text, ContainsSubstring("), " + moment.place + ", died: its process is gone. The job ends."));
  for (int other = 0; other < 3; ++other) {
    if (other == rank) continue;
    CHECK_THAT(out.text, ContainsSubstring("qeffect: error: rank " + std::to_string(other) + " stops because rank " +
                                           std::to_string(rank) + " died"));
  }
}

}  // namespace

TEST_CASE("a rank killed in I, or in a save: the others name it and its place, and all end") {
  check_death(1, moments_of(1)[1], "");
  check_death(2, moments_of(2)[5], "");
}

TEST_CASE(
    "the first, middle or last rank killed at any moment, with a launcher that ends the others and with one that does "
    "not",
    "[slow]") {
  for (int rank = 0; rank < 3; ++rank) {
    for (const Moment& moment : moments_of(rank)) {
      for (const char* options : {"", "--enable-recovery"}) check_death(rank, moment, options);
    }
  }
}

TEST_CASE("a rank killed while the others are in the replicas' reduction alone ends both pipelines", "[slow]") {
  const Job job(4);
  const Outcome out = run(job.mpirun(job.train("--set pipeline.pipeline_model_parallel_size=2 parallel.data=2",
                                               {"crash rank=3 step=2 at=1REDUCE_GRAD"})));
  INFO(out.text);
  CHECK(out.code != 0);
  CHECK(job.ends_within(1));
  CHECK_THAT(out.text, ContainsSubstring("qeffect: error: rank 3 (process ") &&
                           ContainsSubstring("in step 2 at 1REDUCE_GRAD, died"));
}

TEST_CASE("a rank that is stopped for less than the timeout changes no bit", "[slow]") {
  const Job job;
  const Outcome whole = run(job.mpirun(job.train("", {}, "whole")));
  Running stopped(job.mpirun(job.train("--set runtime.timeout_s=60", {"stop rank=1 step=3 at=1I1"})));
  REQUIRE(stopped.reads("injected fault: stop"));
  const std::vector<pid_t> ranks = stopped.children();
  REQUIRE(ranks.size() == 3);
  std::this_thread::sleep_for(std::chrono::seconds(1));
  ::kill(ranks[1], SIGCONT);
  const Outcome out = stopped.finish();
  INFO(out.text);
  CHECK(out.code == 0);
  const std::string digest = word_after(out.text, "parameters XXH3 ");
  CHECK(digest.size() == 16);
  CHECK(digest == word_after(whole.text, "parameters XXH3 "));
}

TEST_CASE("all ranks stopped for longer than the timeout, as a batch system does, go on as if nothing was", "[slow]") {
  const Job job;
  const Outcome whole = run(job.mpirun(job.train("--set training.train_iters=60", {}, "whole")));
  Running running(job.mpirun(job.train("--set training.train_iters=60")));
  REQUIRE(running.reads("step     20/60"));
  const std::vector<pid_t> ranks = running.children();
  REQUIRE(ranks.size() == 3);
  for (const pid_t rank : ranks) ::kill(rank, SIGSTOP);
  std::this_thread::sleep_for(std::chrono::seconds(2 * kTimeout_s));
  for (const pid_t rank : ranks) ::kill(rank, SIGCONT);
  const Outcome out = running.finish();
  INFO(out.text);
  CHECK(out.code == 0);
  CHECK(word_after(out.text, "parameters XXH3 ") == word_after(whole.text, "parameters XXH3 "));
}

TEST_CASE(
    "a rank that is stopped for longer: exit code 8, each other rank says its wait, one line names the slow one") {
  const Job job;
  const auto start = Clock::now();
  const Outcome out = run(job.mpirun(job.train("", {"stop rank=1 step=3 at=1I1"})));
  INFO(out.text);
  CHECK(out.code == 8);
  CHECK(seconds_since(start) < kDeadline_s);
  CHECK(job.ends_within(1));
  CHECK_THAT(out.text, ContainsSubstring("slowest: rank 1 (process ") &&
                           ContainsSubstring("), in step 3 at 1I1, whose process has not run for "));
  for (const char* rank : {"rank 0", "rank 2"}) {
    CHECK_THAT(out.text, ContainsSubstring("qeffect: error: " + std::string(rank)));
  }
  // Step, action with stage and microbatch, peer and seconds.
  CHECK_THAT(out.text, ContainsSubstring("waits for 0RECV_B") || ContainsSubstring("waits for 2RECV_F"));
  CHECK_THAT(out.text, ContainsSubstring("from rank 1 since " + std::to_string(kTimeout_s) + "."));
  CHECK(count(out.text, "in step 3 at ") >= 3);
}

TEST_CASE("a send that is held back for longer than the timeout: the message, the peer and the late rank are named",
          "[slow]") {
  const Job job;
  const Outcome out = run(job.mpirun(job.train("", {"delay step=2 at=1SEND_F2 seconds=60"})));
  INFO(out.text);
  CHECK(out.code == 8);
  CHECK(job.ends_within(1));
  CHECK_THAT(out.text, ContainsSubstring("slowest: rank 1 (process ") &&
                           ContainsSubstring("in step 2 at 1SEND_F2, which waits for nobody and has not moved for " +
                                             std::to_string(kTimeout_s) + "."));
}

namespace {

void check_launcher_death(bool wrapped, const std::vector<std::string>& faults) {
  const Job job;
  const std::string train = job.train("--set training.train_iters=100000", faults);
  std::ofstream(job.dir() / "wrapper.sh") << Job::kQeffect << " " << train << "\n";
  Running launcher(wrapped ? Job::mpiexec("-n 3 sh " + (job.dir() / "wrapper.sh")) : job.mpirun(train));
  REQUIRE(launcher.reads(faults.empty() ? "step     20/" : "injected fault"));
  ::kill(launcher.pid(), SIGKILL);
  CHECK(job.ends_within(15));
  launcher.finish();
}

}  // namespace

TEST_CASE("the launcher killed: no rank is left") { check_launcher_death(false, {}); }

TEST_CASE("the launcher killed: no rank is left behind a wrapper, and none that is stopped or busy", "[slow]") {
  check_launcher_death(true, {});
  check_launcher_death(true, {"stop rank=1 step=30 at=1F0"});
  check_launcher_death(false, {"delay rank=2 step=30 at=2F0 seconds=60"});
}

TEST_CASE("a rank that never joins, and one that is refused alone, keep nobody waiting") {
  const Job job(2);
  const auto start = Clock::now();
  const Outcome alone = run(Job::mpiexec("-n 1 " + Job::kQeffect + " " + job.train() + " : -n 1 sleep 60"));
  INFO(alone.text);
  CHECK(alone.code == 8);
  CHECK_THAT(alone.text, ContainsSubstring("MPI_Init, in which the ranks of the job meet, takes longer than the "
                                           "deadline of " +
                                           std::to_string(kTimeout_s) + " s"));
  // The launcher is told to leave the others alone.
  const Outcome refused = run(Job::mpiexec("--enable-recovery -n 1 " + Job::kQeffect + " " + job.train() + " : -n 1 " +
                                           Job::kQeffect + " train --config " + (job.dir() / "none.json")));
  INFO(refused.text);
  CHECK(count(refused.text, "qeffect: error: rank 1: The config file") == 1);
  CHECK(seconds_since(start) < kDeadline_s);
  CHECK(job.ends_within(1));
  CHECK(!std::filesystem::exists(job.checkpoints()));
}

}  // namespace qe::testing
