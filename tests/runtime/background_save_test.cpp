// Saving in the background: what is written is the state of its own step, to the byte of a save in the loop, whenever
// it is written; and a file that cannot be written is every rank's failure.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>

#include "app/checkpoint/background_save.h"
#include "core/error.h"
#include "tests/catch.h"
#include "tests/runtime/training_run.h"
#include "tests/unit/scratch.h"

namespace qe::testing {
namespace {

const Overrides kTwoRanks{"model.num_layers=4", "model.hidden_size=32", "model.num_attention_heads=2",
                          "pipeline.pipeline_model_parallel_size=2"};

Manifest about(std::int64_t step) {
  Manifest m;
  m.position.step = step;
  m.config = m.environment = nlohmann::ordered_json::object();
  return m;
}

// Every file below a folder, by its path there.
std::map<std::string, std::string> files_in(const std::string& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    if (!entry.is_regular_file()) continue;
    files[std::filesystem::relative(entry.path(), folder).string()] = read_text_file(entry.path().string());
  }
  return files;
}

// Opens for every thread that waits, once.
class Gate {
 public:
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  void pass() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return open_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
};

// A disk on which a tensor file is not written before a gate opens, or never.
class GatedStorage : public Storage {
 public:
  GatedStorage(Gate* gate, bool fails) : gate_(gate), fails_(fails) {}

  void make_directory(const std::string& path) override { disk_->make_directory(path); }
  std::unique_ptr<OutputFile> create(const std::string& path) override {
    if (path.ends_with(".safetensors")) {
      if (gate_ != nullptr) gate_->pass();
      if (fails_) throw CheckpointError("Cannot write " + path + " (No space left on device).");
    }
    return disk_->create(path);
  }
  void rename(const std::string& from, const std::string& to) override { disk_->rename(from, to); }
  void sync_directory(const std::string& path) override { disk_->sync_directory(path); }
  void remove(const std::string& path) override { disk_->remove(path); }

 private:
  Gate* gate_;
  bool fails_;
  std::unique_ptr<Storage> disk_ = make_disk_storage();
};

// A disk from which an old checkpoint cannot be removed.
class KeepingStorage final : public GatedStorage {
 public:
  KeepingStorage() : GatedStorage(nullptr, false) {}
  void remove(const std::string& path) override {
    if (std::filesystem::exists(path) && path.ends_with(".old.tmp")) {
      throw CheckpointError("Cannot remove " + path + " (Input/output error).");
    }
    GatedStorage::remove(path);
  }
};

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const CheckpointError& e) {
    return e.what();
  }
  return "";
}

// What error_of says on each of two ranks, at the boundary after one step.
std::vector<std::string> errors_of(const std::function<std::string(PipelineRank&, Transport&)>& body) {
  std::mutex mutex;
  std::vector<std::string> errors;
  RunOptions options{.steps = 1, .trace = false};
  options.at_boundary = [&](PipelineRank& rank, Transport& t, std::uint32_t) {
    std::string error = body(rank, t);
    const std::lock_guard lock(mutex);
    errors.push_back(std::move(error));
  };
  run_training(test_config(kTwoRanks), options);
  return errors;
}

struct Outcome {
  std::map<std::string, std::string> in_loop, in_background;  // files after the run
  std::vector<int> settled_early;                             // by call
  TraceRecords trace;
};

// Saves step 2 in the loop, and in the background so that nothing is written before step 4 is done.
Outcome save_late(const Overrides& overrides) {
  const Scratch dir;
  Gate gate;
  std::mutex mutex;
  std::map<int, StateCopy> copies;  // by rank
  std::map<int, std::unique_ptr<BackgroundSave>> saves;
  std::map<int, std::unique_ptr<GatedStorage>> storages;
  Outcome outcome;
  RunOptions options{.steps = 4};
  options.at_boundary = [&](PipelineRank& rank, Transport& t, std::uint32_t step) {
    const int me = t.rank(Group::kWorld);
    const auto disk = make_disk_storage();
    if (step == 2) {
      save_checkpoint(*disk, t, rank, dir / "loop", {}, about(2));
      auto storage = std::make_unique<GatedStorage>(&gate, false);
      StateCopy* copy = nullptr;
      {
        const std::lock_guard lock(mutex);
        copy = &copies[me];
      }
      auto save = std::make_unique<BackgroundSave>(*storage, t, rank, *copy, dir / "background", Retention{}, about(2));
      const std::lock_guard lock(mutex);
      storages[me] = std::move(storage);
      saves[me] = std::move(save);
    }
    BackgroundSave* save = nullptr;
    {
      const std::lock_guard lock(mutex);
      save = saves[me].get();
    }
    if (save != nullptr) {
      const bool settled = save->settled();
      const std::lock_guard lock(mutex);
      outcome.settled_early.push_back(settled);
    }
    if (step < 4) return;
    t.barrier(Group::kWorld);
    gate.open();
    save->publish();
    t.barrier(Group::kWorld);
    const std::lock_guard lock(mutex);
    saves.erase(me);
  };
  outcome.trace = run_training(test_config(overrides), options).trace;
  outcome.in_loop = files_in(dir / "loop");
  outcome.in_background = files_in(dir / "background");
  return outcome;
}

}  // namespace

TEST_CASE("a save that is written two steps late holds its own step, file by file the bytes of a save in the loop") {
  for (const Overrides& more : {Overrides{}, Overrides{"parallel.data=2", "training.global_batch_size=8"},
                                Overrides{"optimizer.moments_dtype=bf16", "execution.mode=graph"}}) {
    const Overrides cell = kTwoRanks + more;
    const Outcome outcome = save_late(cell);
    CHECK(outcome.in_loop.size() == 4);  // two ranks' files, the manifest, latest
    CHECK(outcome.in_loop == outcome.in_background);
    CHECK(outcome.settled_early == std::vector<int>(outcome.settled_early.size(), 0));
    // Training does not notice: the run without any save is the same.
    CHECK(differences(run_training(test_config(cell), {.steps = 4}).trace, outcome.trace).empty());
  }
}

TEST_CASE(
    "a file that cannot be written in the background is an error with its path on every rank, and leaves nothing") {
  for (const int bad_rank : {0, 1}) {
    const Scratch dir;
    std::atomic<int> loads_first = 0;
    const std::vector<std::string> errors = errors_of([&](PipelineRank& rank, Transport& t) {
      save_checkpoint(*make_disk_storage(), t, rank, dir / "c", {}, about(1));
      GatedStorage storage(nullptr, t.rank(Group::kWorld) == bad_rank);
      StateCopy copy;
      BackgroundSave save(storage, t, rank, copy, dir / "c", {}, about(2));
      while (!save.settled()) {
      }
      std::string error = error_of([&] { save.publish(); });
      loads_first += find_checkpoint(t, dir / "c", "latest")->manifest.position.step == 1 ? 1 : 0;
      return error;
    });
    REQUIRE(errors.size() == 2);
    CHECK(errors[0] == errors[1]);
    CHECK_THAT(errors[0], ContainsSubstring("rank " + std::to_string(bad_rank) + ": Cannot write " + (dir / "c")) &&
                              ContainsSubstring("rank_0000" + std::to_string(bad_rank) + ".safetensors"));
    CHECK(loads_first == 2);
    CHECK(unfinished_in(dir / "c").empty());
  }
}

TEST_CASE("an old checkpoint that cannot be removed is told by every rank alike, and the new one is there") {
  const Scratch dir;
  const std::vector<std::string> errors = errors_of([&](PipelineRank& rank, Transport& t) {
    save_checkpoint(*make_disk_storage(), t, rank, dir / "c", {}, about(1));
    KeepingStorage storage;
    StateCopy copy;
    BackgroundSave save(storage, t, rank, copy, dir / "c", {.keep_last = 1}, about(2));
    save.publish();
    return error_of([&] { save.close(); });
  });
  REQUIRE(errors.size() == 2);
  CHECK(errors[0] == errors[1]);
  CHECK_THAT(errors[0], ContainsSubstring("rank 0: Cannot remove " + (dir / "c")));
  CHECK(steps_in(dir / "c") == std::vector<std::int64_t>{2});
}

TEST_CASE("one rank's failure is told while another rank still has much to write") {
  const Scratch dir;
  Gate gate;
  const std::vector<std::string> errors = errors_of([&](PipelineRank& rank, Transport& t) {
    const int me = t.rank(Group::kWorld);
    GatedStorage storage(me == 0 ? &gate : nullptr, me == 1);  // rank 0's file waits, rank 1's fails at once
    StateCopy copy;
    BackgroundSave save(storage, t, rank, copy, dir / "c", {}, about(1));
    while (!save.settled()) {
    }
    t.barrier(Group::kWorld);
    gate.open();
    return error_of([&] { save.publish(); });
  });
  REQUIRE(errors.size() == 2);
  CHECK(errors[0] == errors[1]);
  CHECK_THAT(errors[0], ContainsSubstring("rank 1: Cannot write"));
  CHECK(errors[0].find("rank 0") == std::string::npos);
}

TEST_CASE("a save that is given up is not published, and the next one takes its place") {
  const Scratch dir;
  RunOptions options{.steps = 1, .trace = false};
  options.at_boundary = [&](PipelineRank& rank, Transport& t, std::uint32_t) {
    const auto disk = make_disk_storage();
    StateCopy copy;
    { const BackgroundSave given_up(*disk, t, rank, copy, dir / "c", {}, about(1)); }
    t.barrier(Group::kWorld);
    if (find_checkpoint(t, dir / "c", "latest")) throw CheckpointError("it was published");
    BackgroundSave save(*disk, t, rank, copy, dir / "c", {}, about(2));
    save.publish();
  };
  run_training(test_config(kTwoRanks), options);
  CHECK(steps_in(dir / "c") == std::vector<std::int64_t>{2});
  CHECK(unfinished_in(dir / "c").empty());
}

}  // namespace qe::testing
