// Faults made on purpose: what may be asked for, and that each call for a file fails as asked, once.
#include "app/injected_faults.h"

#include <filesystem>
#include <functional>
#include <map>

#include "app/config.h"
#include "core/error.h"
#include "tests/catch.h"
#include "tests/unit/scratch.h"

using namespace qe;

namespace {

// Two ranks of two stages, four microbatches, a hundred steps.
Config with(const std::vector<std::string>& entries) {
  std::string list;
  for (const std::string& e : entries) list += (list.empty() ? "\"" : ", \"") + e + "\"";
  return parse_config(R"({"pipeline": {"pipeline_model_parallel_size": 2, "schedule": "zbv"},
                          "runtime": {"faults": [)" +
                          list + "]}}",
                      "x.json");
}

std::string refusal(const std::string& entry) {
  try {
    with({entry});
  } catch (const ConfigError& e) {
    return e.what();
  }
  return "accepted";
}

struct Disk {
  explicit Disk(const std::string& entry)
      : storage(make_faulty_storage(make_disk_storage(), place, std::make_shared<FaultPlan>(with({entry}), 1))) {}
  RankPlace place{nullptr};
  std::unique_ptr<Storage> storage;
};

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const CheckpointError& e) {
    return e.what();
  }
  return "";
}

}  // namespace

TEST_CASE("what the table of kinds allows is accepted, with the keys that it names") {
  for (const char* entry :
       {"crash at=1I0", "crash rank=1 step=3 at=1REDUCE_GRAD", "stop at=optimizer", "delay at=0SEND_F1 seconds=0.5",
        "fail step=100 at=2F3", "drop at=2W1", "stale at=1I0 layout=bf16_copies", "nan at=1W1 matrix=2",
        "alias stage=3 matrix=1 microbatch=3", "error at=write file=manifest.json code=ENOSPC byte=middle",
        "error at=rename file=step code=EIO", "crash at=fsync step=2", "delay at=write byte=7 seconds=1"}) {
    INFO(entry);
    CHECK(refusal(entry) == "accepted");
  }
}

TEST_CASE("what cannot be is refused with the entry and what was wanted, all of them in one message") {
  const std::pair<const char*, const char*> wrong[] = {
      {"", "begins with no kind of fault; there are alias, crash"},
      {"crsh at=1I0", "begins with no kind of fault"},
      {"crash", "needs at="},
      {"crash at=1I0 at=1I0", "has at twice"},
      {"crash at=1X0", "wanted an action as 2I0, optimizer, or a call for a file: create"},
      {"crash 1I0", "has 1I0, and crash takes at, rank, step, file and byte"},
      {"crash at=1I0 color=red", "has color=red, and crash takes"},
      {"crash at=1I0 rank=2", "has rank=2, wanted 0 to 1"},
      {"crash at=1I0 rank=1x", "has rank=1x, wanted 0 to 1"},
      {"crash at=1I0 step=101", "has step=101, wanted 0 to 100"},
      {"crash at=1I0 file=latest", "has file= or byte= for what is no call for a file"},
      {"crash at=rename byte=1", "has byte= for what is no write"},
      {"delay at=1I0", "needs seconds="},
      {"delay at=1I0 seconds=-1", "wanted 0 to"},
      {"fail at=write", "error does"},
      {"error at=1I0 code=EIO", "needs a call for a file"},
      {"error at=write code=ENOENT", "wanted one of EIO and ENOSPC"},
      {"error at=write code=EIO byte=half", "byte=half"},
      {"drop at=1I0", "needs a W at at="},
      {"stale at=1W0 layout=rowwise", "needs an F, I or B at at="},
      {"stale at=1F0 layout=flat", "wanted one of bf16_copies, columnwise and rowwise"},
      {"nan at=1F0", "needs a W or a B"},
      {"alias stage=0 matrix=0", "has matrix=0, wanted 1 to"},
      {"alias stage=4 matrix=1", "has stage=4, wanted 0 to 3"},
  };
  for (const auto& [entry, what] : wrong) {
    INFO(entry);
    CHECK_THAT(refusal(entry), ContainsSubstring("runtime.faults: \"" + std::string(entry) + "\"") &&
                                   ContainsSubstring(what) && ContainsSubstring("see docs/failures.md."));
  }
  CHECK_THROWS_WITH(with({"crsh", "crash at=x", "crash at=0F0"}), ContainsSubstring("has 2 faults"));
}

TEST_CASE("faults need the command line's consent, and an action that some rank runs") {
  const Config c = with({"crash at=1I0"});
  CHECK_NOTHROW(expect_faults_allowed(c, true));
  CHECK_THROWS_WITH(expect_faults_allowed(c, false), ContainsSubstring("--enable-fault-injection"));
  CHECK_NOTHROW(expect_faults_allowed(with({}), false));
  CHECK_THROWS_WITH(expect_faults_allowed(with({"crash at=1I4"}), true), ContainsSubstring("that no rank runs"));
}

TEST_CASE("a plan holds its own rank's faults; each is taken once, at its step") {
  const Config c = with({"fail rank=0 at=1I0", "fail step=3 at=1I0", "delay at=1I0 seconds=2", "nan at=1W0"});
  FaultPlan plan(c, 1);
  const Action i = parse_action("1I0"), w = parse_action("1W0");
  CHECK(plan.take({.step = 2, .action = &i})->kind == FaultKind::kDelay);
  CHECK(!plan.take({.step = 2, .action = &i}));
  CHECK(plan.take({.step = 3, .action = &i})->kind == FaultKind::kFail);
  CHECK(!plan.take({.step = 3, .action = &i}));
  CHECK(!plan.take({.step = 3, .action = &w}));  // nan waits until the action was issued
  CHECK(plan.take({.step = 3, .action = &w, .done = true})->kind == FaultKind::kNan);
  CHECK(plan.empty());
}

TEST_CASE("each call for a file fails where asked, with the system's words, and goes well the next time") {
  for (const auto& [at, doing] : {std::pair{"create", "create"},
                                  {"fsync", "sync"},
                                  {"close", "close"},
                                  {"write byte=0", "write"},
                                  {"write byte=middle", "write"},
                                  {"write byte=last", "write"},
                                  {"write byte=3", "write"},
                                  {"write byte=99", "write"}}) {
    const Scratch dir;
    Disk disk("error code=ENOSPC file=a.bin at=" + std::string(at));
    INFO(at);
    disk.storage->write_file(dir / "b.bin", "another");
    CHECK(error_of([&] { disk.storage->write_file(dir / "a.bin", "0123456789"); }) ==
          "Cannot " + std::string(doing) + " " + (dir / "a.bin") +
              " (No space left on device); check free space and permissions of that folder.");
    const std::map<std::string, std::uintmax_t> written{{"write byte=0", 0},    {"write byte=middle", 5},
                                                        {"write byte=last", 9}, {"write byte=3", 3},
                                                        {"write byte=99", 10},  {"fsync", 10},
                                                        {"close", 10}};
    if (written.contains(at)) CHECK(std::filesystem::file_size(dir / "a.bin") == written.at(at));
    disk.storage->write_file(dir / "a.bin", "0123456789");
    CHECK(std::filesystem::file_size(dir / "a.bin") == 10);
  }
}

TEST_CASE("calls for folders fail by name, and a checkpoint's files by its step") {
  const Scratch dir;
  Disk disk("error code=EIO at=rename file=step step=7");
  disk.place.set(Phase::kStep, 7);
  for (const char* name : {"step_00000006.tmp", "step_00000007.tmp"}) disk.storage->make_directory(dir / name);
  disk.storage->rename(dir / "step_00000006.tmp", dir / "step_00000006");
  CHECK_THAT(error_of([&] { disk.storage->rename(dir / "step_00000007.tmp", dir / "step_00000007"); }),
             ContainsSubstring("Input/output error"));
  CHECK(std::filesystem::exists(dir / "step_00000007.tmp"));
  Disk sync("error code=EIO at=sync file=step.tmp");
  sync.storage->sync_directory(dir.path());
  CHECK_THAT(error_of([&] { sync.storage->sync_directory(dir / "step_00000007.tmp"); }),
             ContainsSubstring("Cannot sync the folder"));
  Disk remove("error code=EIO at=remove file=step");
  CHECK_THAT(error_of([&] { remove.storage->remove(dir / "step_00000006"); }), ContainsSubstring("Cannot remove"));
}
