// A call for a checkpoint's file fails or kills the process, on one rank: every rank learns of it, and the same command
// goes on from the newest complete checkpoint to the bytes of a run that nothing disturbed.
#include <set>

#include "tests/catch.h"
#include "tests/faults/job.h"

namespace qe::testing {
namespace {

std::string final_digest(const Outcome& out) { return word_after(out.text, "parameters XXH3 "); }

// One job's folder, and what an undisturbed run ends with.
struct Reference {
  Job job{2};
  std::string digest = final_digest(run(job.mpirun(job.train("", {}, "whole"))));
};

void check_recovery(const Reference& reference, const std::string& fault, const std::string& name) {
  const Job& job = reference.job;
  INFO(fault);
  const Outcome broken = run(job.mpirun(job.train("--resume", {fault}, name)));
  INFO(broken.text);
  if (fault.starts_with("error")) {
    CHECK(broken.code == 5);
    CHECK(count(broken.text, "qeffect: error: ") == 1);  // told once, by agreement of the ranks
    CHECK_THAT(broken.text, ContainsSubstring(fault.find("EIO") == std::string::npos ? "(No space left on device)"
                                                                                     : "(Input/output error)"));
    CHECK_THAT(text_of(job.dir() / (name + "/report/report.json")), ContainsSubstring("\"step\": 4"));
  } else {
    CHECK(broken.code != 0);
  }
  CHECK(job.ends_within(1));
  const Outcome again = run(job.mpirun(job.train("--resume", {}, name)));
  INFO(again.text);
  CHECK(again.code == 0);
  const std::string from = word_after(again.text, "resumed from " + job.checkpoints(name) + "/");
  CHECK((from == "step_00000002" || (from == "step_00000004" && fault.find("latest") != std::string::npos) ||
         (from == "step_00000004" && fault.find("file=step ") != std::string::npos)));
  CHECK(final_digest(again) == reference.digest);
  std::filesystem::remove_all(job.dir() / name);
}

// Every call of the save after step 4, in order, each on the rank that makes it.
std::vector<std::string> calls() {
  std::vector<std::string> all;
  for (const char* file : {"rank_00000.safetensors", "rank_00001.safetensors", "manifest.json", "latest.tmp"}) {
    for (const char* at : {"create", "write", "write byte=middle", "write byte=last", "fsync", "close"}) {
      all.push_back("step=4 file=" + std::string(file) + " at=" + at);
    }
  }
  for (const char* at : {"at=sync file=step.tmp", "at=rename file=step", "at=rename file=latest"}) {
    all.push_back("step=4 " + std::string(at));
  }
  return all;
}

}  // namespace

TEST_CASE("no space in one rank's file: both say so in that step, and the same command goes on to the same bytes") {
  const Reference reference;
  REQUIRE(reference.digest.size() == 16);
  check_recovery(reference, "error step=4 at=write byte=middle file=rank_00001.safetensors code=ENOSPC", "space");
}

TEST_CASE("every call of a save, failing with both errors and killing the rank", "[slow]") {
  const Reference reference;
  for (const std::string& call : calls()) {
    for (const char* kind : {"error code=ENOSPC ", "error code=EIO ", "crash "}) {
      check_recovery(reference, kind + call, "run");
    }
  }
}

TEST_CASE("keep_last 2, saved after each of six steps: the two newest stay, and nothing else", "[slow]") {
  for (const char* async : {"false", "true"}) {
    const Job job(2);
    const std::string keys = std::string("checkpoint.interval=1 checkpoint.keep_last=2 checkpoint.async=") + async;
    REQUIRE(run(job.mpirun(job.train("--set " + keys))).code == 0);
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(job.checkpoints())) {
      names.insert(entry.path().filename().string());
    }
    CHECK(names == std::set<std::string>{"latest", "step_00000005", "step_00000006"});
  }
}

}  // namespace qe::testing
