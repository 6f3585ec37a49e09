// Saving in the background under mpirun: the run that a user sees is the one that saves in its loop, and what goes
// wrong while a file is being written is told, survived or waited for.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "tests/catch.h"
#include "tests/faults/job.h"

namespace qe::testing {
namespace {

using Json = nlohmann::json;

const std::string kAsync = "--set checkpoint.async=true ";

Json report(const Job& job, const std::string& name = "run") {
  return Json::parse(text_of(job.dir() / (name + "/report/report.json")));
}

std::string final_digest(const Outcome& out) { return word_after(out.text, "parameters XXH3 "); }

std::string tensor_file(const Job& job, const std::string& name, int step, int rank) {
  return text_of(job.checkpoints(name) + "/step_0000000" + std::to_string(step) + "/rank_0000" + std::to_string(rank) +
                 ".safetensors");
}

bool complete(const Job& job, const std::string& step) {
  return std::filesystem::exists(job.checkpoints() + "/" + step + "/manifest.json");
}

// After a failure while step 4 was being written.
void check_recovery(const Job& job) {
  CHECK(job.ends_within(2));
  const Outcome again = run(job.mpirun(job.train(kAsync + "--resume")));
  const Outcome whole = run(job.mpirun(job.train("", {}, "whole")));
  INFO(again.text);
  CHECK(again.code == 0);
  CHECK_THAT(again.text, ContainsSubstring("resumed from " + job.checkpoints() + "/step_00000002"));
  CHECK(final_digest(again) == final_digest(whole));
}

}  // namespace

TEST_CASE("a run that saves in the background has the losses, weights and tensor files of one that saves in its loop") {
  const Job job(2);
  const Outcome loop = run(job.mpirun(job.train("", {}, "loop")));
  const Outcome background = run(job.mpirun(job.train(kAsync, {}, "background")));
  INFO(loop.text << background.text);
  REQUIRE(loop.code == 0);
  REQUIRE(background.code == 0);
  CHECK(final_digest(background) == final_digest(loop));
  CHECK(report(job, "background")["final"] == report(job, "loop")["final"]);
  for (const int step : {4, 6}) {
    for (const int rank : {0, 1}) {
      const std::string bytes = tensor_file(job, "loop", step, rank);
      CHECK(bytes.size() > 1000);
      CHECK((tensor_file(job, "background", step, rank) == bytes));
    }
  }
  for (const char* name : {"loop", "background"}) {
    const Json saves = report(job, name)["checkpoints"];
    REQUIRE(saves.size() == 3);
    for (std::size_t i = 0; i < 3; ++i) {
      CHECK(saves[i]["step"] == 2 * (i + 1));
      CHECK(saves[i]["background"] == (std::string(name) == "background"));
      CHECK(saves[i]["write_ms"].get<double>() > 0);
      CHECK(saves[i]["stall_ms"].get<double>() > 0);
      CHECK(saves[i]["bytes"] == tensor_file(job, name, 6, 0).size() + tensor_file(job, name, 6, 1).size());
    }
  }
}

TEST_CASE("a disk slower than every deadline holds up no step before the next save, and is waited for", "[slow]") {
  const Job job(2);  // runtime.timeout_s 2
  const Outcome out =
      run(job.mpirun(job.train(kAsync, {"delay step=2 at=fsync file=rank_00001.safetensors seconds=3"})));
  INFO(out.text);
  REQUIRE(out.code == 0);
  const std::size_t step_4 = out.text.find("step      4/6"), saved_2 = out.text.find("step_00000002 in");
  REQUIRE(saved_2 != std::string::npos);
  CHECK(step_4 < saved_2);
  const Json saves = report(job)["checkpoints"];
  REQUIRE(saves.size() == 3);
  CHECK(saves[0]["write_ms"].get<double>() > 3000);
  CHECK(saves[0]["waited_ms"].get<double>() > 1000);  // step 4's save came too soon
  CHECK(saves[0]["stall_ms"] >= saves[0]["waited_ms"]);
  CHECK(complete(job, "step_00000006"));
}

TEST_CASE("no space in one rank's file: every rank ends with that error, and the same command goes on") {
  const Job job(2);
  const Outcome broken =
      run(job.mpirun(job.train(kAsync, {"error step=4 at=write byte=middle file=rank_00001.safetensors code=ENOSPC"})));
  INFO(broken.text);
  CHECK(broken.code == 5);
  CHECK(count(broken.text, "qeffect: error: ") == 1);
  CHECK_THAT(broken.text, ContainsSubstring("rank 1: Cannot write") && ContainsSubstring("No space left on device"));
  check_recovery(job);
}

TEST_CASE(
    "an old checkpoint that cannot be removed beside the training: the run ends with its path, and the new ones are "
    "whole and told") {
  const std::string error = "error step=2 at=remove file=step.old.tmp code=EIO";
  const std::string late = "delay step=4 at=fsync file=rank_00000.safetensors seconds=1";  // step 6 waits for it
  for (const std::vector<std::string>& faults : {std::vector<std::string>{error}, {error, late}}) {
    const Job job(2);
    const Outcome out = run(job.mpirun(job.train(kAsync + "checkpoint.keep_last=1", faults)));
    INFO(out.text);
    CHECK(out.code == 5);
    CHECK(count(out.text, "qeffect: error: ") == 1);
    CHECK_THAT(out.text, ContainsSubstring("Cannot remove " + job.checkpoints() + "/step_00000002.old.tmp"));
    CHECK(complete(job, "step_00000004"));
    for (const std::string step : {"step_00000004", "step_00000006"}) {
      if (complete(job, step)) CHECK_THAT(out.text, ContainsSubstring("saved " + job.checkpoints() + "/" + step));
    }
  }
}

TEST_CASE("a rank that is killed while it writes leaves the checkpoint before, and the same command goes on",
          "[slow]") {
  const Job job(2);
  for (const char* at : {"at=write byte=middle", "at=fsync", "at=close"}) {
    INFO(at);
    const std::string fault = "crash step=4 file=rank_00000.safetensors " + std::string(at);
    CHECK(run(job.mpirun(job.train(kAsync, {fault}))).code != 0);
    check_recovery(job);
    std::filesystem::remove_all(job.dir() / "run");
  }
}

TEST_CASE("a signal, and a loss that is not finite, wait for the save that is being written", "[slow]") {
  const std::string slow = "delay step=4 at=fsync file=rank_00000.safetensors seconds=1";
  SECTION("a signal") {
    const Job job(2);
    Running running(
        job.mpirun(job.train(kAsync + "training.train_iters=100000 training.lr_warmup_iters=100000", {slow})));
    REQUIRE(running.reads("step      4/"));
    ::kill(running.pid(), SIGUSR1);
    const Outcome out = running.finish();
    INFO(out.text);
    CHECK(out.code == 75);
    CHECK(complete(job, "step_00000004"));
    const Json saves = report(job)["checkpoints"];
    const std::string last = std::to_string(report(job)["steps"].get<int>());
    CHECK(std::to_string(saves.back()["step"].get<int>()) == last);
    CHECK(complete(job, "step_" + std::string(8 - last.size(), '0') + last));
  }
  SECTION("a loss that is not finite") {
    const Job job(2);
    const Outcome out = run(job.mpirun(job.train(kAsync, {slow, "nan step=5 at=1W0"})));
    INFO(out.text);
    CHECK(out.code == 7);
    CHECK(complete(job, "step_00000004"));
    CHECK(report(job)["checkpoints"].back()["step"] == 4);
    CHECK(report(job)["status"] == "failed");
  }
}

}  // namespace qe::testing
