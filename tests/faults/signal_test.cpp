// Requests to stop, under mpirun: whoever gets the signal, all ranks finish the same step, save and can go on.
#include <nlohmann/json.hpp>

#include "tests/catch.h"
#include "tests/faults/job.h"

namespace qe::testing {
namespace {

using Json = nlohmann::json;

const std::string kLong = "--set training.train_iters=100000 training.lr_warmup_iters=100000 checkpoint.interval=0";

std::vector<Json> steps_of(const Job& job) {
  std::ifstream file(job.dir() / "run/report/metrics.jsonl");
  std::vector<Json> steps;
  for (std::string line; std::getline(file, line);) {
    Json j = Json::parse(line);
    if (j["event"] == "step") steps.push_back(std::move(j));
  }
  return steps;
}

enum class Receiver { kLauncher, kOne, kAll };

Outcome stopped_by(const Job& job, int signal, Receiver receiver) {
  Running running(job.mpirun(job.train(kLong)));
  REQUIRE(running.reads("step     10/"));
  const std::vector<pid_t> ranks = running.children();
  REQUIRE(ranks.size() == 3);
  if (receiver == Receiver::kLauncher) ::kill(running.pid(), signal);
  if (receiver == Receiver::kOne) ::kill(ranks[2], signal);
  if (receiver == Receiver::kAll) {
    for (const pid_t rank : ranks) ::kill(rank, signal);
  }
  return running.finish();
}

void check_stop(int signal, Receiver receiver) {
  const Job job;
  INFO("signal " << signal << ", receiver " << static_cast<int>(receiver));
  const Outcome out = stopped_by(job, signal, receiver);
  INFO(out.text);
  // mpirun has a code of its own when it is the one that is asked to end.
  if (signal == SIGUSR1 || receiver != Receiver::kLauncher) CHECK(out.code == 75);
  CHECK(job.ends_within(5));
  const std::size_t steps = steps_of(job).size();
  CHECK(steps >= 10);
  std::string digits = std::to_string(steps);
  digits.insert(0, 8 - digits.size(), '0');
  CHECK(std::filesystem::exists(job.checkpoints() + "/step_" + digits + "/manifest.json"));
  CHECK(text_of(job.checkpoints() + "/latest") == "step_" + digits + "\n");
}

}  // namespace

TEST_CASE("SIGTERM to all ranks, as a batch system sends it: all finish one step, save, and exit 75") {
  check_stop(SIGTERM, Receiver::kAll);
}

TEST_CASE("SIGTERM and SIGUSR1 to the launcher, to one rank and to all are the same request", "[slow]") {
  for (const int signal : {SIGTERM, SIGUSR1}) {
    for (const Receiver receiver : {Receiver::kLauncher, Receiver::kOne, Receiver::kAll}) check_stop(signal, receiver);
  }
}

TEST_CASE("a second signal ends the job at once, in the middle of a step") {
  const Job job;
  Running running(job.mpirun(job.train(kLong + " --set runtime.timeout_s=100", {"delay step=20 at=1I0 seconds=60"})));
  REQUIRE(running.reads("injected fault: delay"));
  const pid_t rank = running.children().at(1);
  ::kill(rank, SIGTERM);
  REQUIRE(running.reads("asked to stop; saving after this step"));
  std::this_thread::sleep_for(std::chrono::milliseconds(1100));
  const auto start = Clock::now();
  ::kill(rank, SIGTERM);
  CHECK(running.finish().code != 0);
  CHECK(seconds_since(start) < 5);
  CHECK(job.ends_within(1));
  CHECK(!std::filesystem::exists(job.checkpoints() + "/latest"));
}

TEST_CASE("three slices of a batch system, shorter than the save interval: each goes on where the last one ended") {
  const Job job;
  std::size_t done = 0;
  std::string digest;
  for (const bool more : {true, false, true}) {  // the middle one is told to stop before its first step
    Running slice(job.mpirun(job.train(kLong + " --resume")));
    if (done > 0) REQUIRE(slice.reads("resumed from"));
    const std::string target = std::to_string(done + 10);
    if (more) REQUIRE(slice.reads("step " + std::string(6 - target.size(), ' ') + target + "/"));
    ::kill(slice.pid(), SIGUSR1);
    const Outcome out = slice.finish();
    INFO(out.text);
    CHECK(out.code == 75);
    if (done > 0)
      CHECK_THAT(out.text, ContainsSubstring("after step " + std::to_string(done) + ", parameters XXH3 " + digest));
    digest = word_after(out.text, "parameters XXH3 ");
    const std::vector<Json> steps = steps_of(job);
    CHECK(steps.size() > done);
    done = steps.size();
  }
  const std::vector<Json> steps = steps_of(job);
  for (std::size_t i = 0; i < steps.size(); ++i) {
    CHECK(steps[i]["step"] == i + 1);
    CHECK(steps[i]["lr"].get<double>() == 1e-3 * static_cast<double>(i + 1) / 100000);
  }
}

}  // namespace qe::testing
