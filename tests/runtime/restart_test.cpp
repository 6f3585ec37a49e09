// A run that was saved and loaded into new objects is the uninterrupted run, to the byte, under the same cut or
// another; and a save that fails anywhere, on any rank, leaves a checkpoint that can be loaded.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>

#include "app/checkpoint/checkpoint.h"
#include "core/dtype.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/thread_transport.h"
#include "tests/catch.h"
#include "tests/runtime/training_run.h"
#include "tests/unit/scratch.h"

namespace qe::testing {
namespace {

Overrides pipeline(const std::string& schedule, int ranks, int chunks = 1) {
  return {"pipeline.schedule=" + schedule, "pipeline.pipeline_model_parallel_size=" + std::to_string(ranks),
          "pipeline.virtual_pipeline_model_parallel_size=" + std::to_string(chunks)};
}
const Overrides kInterleaved = pipeline("interleaved_1f1b", 2, 2), kZbv = pipeline("zbv", 2, 2);

Manifest about(std::int64_t step) {
  Manifest m;
  m.position.step = step;
  m.config = m.environment = nlohmann::ordered_json::object();
  return m;
}

SavedCheckpoint save(PipelineRank& rank, Transport& transport, const std::string& dir, std::int64_t step,
                     Storage* storage = nullptr, const Retention& retention = {}) {
  const auto disk = make_disk_storage();
  return save_checkpoint(storage != nullptr ? *storage : *disk, transport, rank, dir, retention, about(step));
}

FoundCheckpoint load(PipelineRank& rank, Transport& transport, const std::string& dir,
                     Restored what = Restored::kEverything) {
  auto found = find_checkpoint(transport, dir, "latest");
  if (!found) throw CheckpointError("there is nothing in " + dir);
  load_checkpoint(transport, rank, *found, what);
  return *found;
}

// Steps first … last of a run, loaded from `dir` before them unless first is 1, and saved there after the last.
TraceRecords part_of_run(const Overrides& overrides, const std::string& dir, std::uint32_t first, std::uint32_t last,
                         bool save_at_end) {
  RunOptions options{.steps = static_cast<int>(last)};
  options.first_step = first;
  if (first > 1) options.before_steps = [&](PipelineRank& rank, Transport& t) { load(rank, t, dir); };
  if (save_at_end) {
    options.at_boundary = [&](PipelineRank& rank, Transport& t, std::uint32_t step) {
      if (step == last) save(rank, t, dir, step);
    };
  }
  return run_training(test_config(overrides), options).trace;
}

TraceRecords from_step(TraceRecords records, std::uint64_t first) {
  std::erase_if(records, [&](const auto& r) { return r.first.step < first; });
  return records;
}

void require_equal(const TraceRecords& expected, const TraceRecords& got) {
  std::string text;
  for (const std::string& line : differences(expected, got)) text += "\n  " + line;
  INFO(text);
  REQUIRE(!got.empty());
  REQUIRE(text.empty());
}

// Two small layers on two ranks, for tests of files.
Config small_config(const Overrides& more = {}) {
  return test_config(Overrides{"model.num_layers=2", "model.hidden_size=32", "model.ffn_hidden_size=32",
                               "model.num_attention_heads=2"} +
                     pipeline("1f1b", 2) + more);
}

std::map<std::string, std::vector<unsigned char>> state_of(PipelineRank& rank) {
  std::map<std::string, std::vector<unsigned char>> state;
  for (const StateEntry& e : rank.state()) state[e.name] = rank.read(e);
  return state;
}

std::map<std::string, std::string> digests(const Manifest& m) {
  std::map<std::string, std::string> by_name;
  for (const ManifestTensor& t : m.tensors) by_name[t.name] = t.xxh3;
  return by_name;
}

// Lets a number of calls through; then one fails, or nothing has an effect any more, as if the process had died there.
class FailingStorage final : public Storage {
 public:
  enum class Mode : std::uint8_t { kError, kDeath };
  FailingStorage(int calls, Mode mode) : left_(calls), mode_(mode) {}

  [[nodiscard]] int calls() const noexcept { return calls_; }

  void make_directory(const std::string& path) override {
    if (passes(path)) disk_->make_directory(path);
  }
  std::unique_ptr<OutputFile> create(const std::string& path) override {
    return std::make_unique<File>(*this, path, passes(path) ? disk_->create(path) : nullptr);
  }
  void rename(const std::string& from, const std::string& to) override {
    if (passes(to)) disk_->rename(from, to);
  }
  void sync_directory(const std::string& path) override {
    if (passes(path)) disk_->sync_directory(path);
  }
  void remove(const std::string& path) override {
    if (passes(path)) disk_->remove(path);
  }

 private:
  class File final : public OutputFile {
   public:
    File(FailingStorage& owner, std::string path, std::unique_ptr<OutputFile> file)
        : owner_(owner), path_(std::move(path)), file_(std::move(file)) {}
    void write(Bytes bytes) override {
      const bool was_alive = !owner_.failed_;
      if (owner_.passes(path_)) {
        file_->write(bytes);
      } else if (was_alive && file_) {
        file_->write(bytes.first(bytes.size() / 2));
      }
    }
    void finish() override {
      if (owner_.passes(path_)) file_->finish();
    }

   private:
    FailingStorage& owner_;
    std::string path_;
    std::unique_ptr<OutputFile> file_;
  };

  bool passes(const std::string& path) {
    if (failed_) return mode_ == Mode::kError;  // an error is over when it was reported
    ++calls_;
    if (left_-- > 0) return true;
    failed_ = true;
    if (mode_ == Mode::kError) throw CheckpointError("Cannot write " + path + " (No space left on device).");
    return false;
  }

  std::unique_ptr<Storage> disk_ = make_disk_storage();
  int left_, calls_ = 0;
  Mode mode_;
  bool failed_ = false;
};

// Which of n calls to try: all at both ends, where folders and files are made and published, and some of the many
// between them, which write tensors.
std::vector<int> some_of(int n) {
  std::vector<int> chosen;
  for (int i = 0; i < n; ++i) {
    if (i < 6 || i >= n - 16 || i % 11 == 0) chosen.push_back(i);
  }
  return chosen;
}

// Saves step 1, then step 2 with a storage that fails on one rank after some number of calls; both ranks must agree on
// what happened, and on a checkpoint that loads. Returns the number of calls that a save makes there.
int failing_saves(int bad_rank, FailingStorage::Mode mode) {
  const Scratch dir;
  std::mutex mutex;
  std::map<int, std::vector<std::string>> errors;  // by call, of both ranks
  int needed = 0;
  RunOptions options{.steps = 1, .trace = false};
  options.at_boundary = [&](PipelineRank& rank, Transport& t, std::uint32_t) {
    const auto disk = make_disk_storage();
    const auto state = state_of(rank);
    const int me = t.rank(Group::kWorld);
    FailingStorage counting(std::numeric_limits<int>::max(), mode);
    save(rank, t, dir / "counted", 1, &counting);
    const int calls =
        std::stoi(t.exchange(std::to_string(counting.calls()), Group::kWorld).at(static_cast<std::size_t>(bad_rank)));
    if (me == bad_rank) needed = calls;
    for (const int call : some_of(calls)) {
      const std::string folder = dir / std::to_string(call);
      save(rank, t, folder, 1);
      FailingStorage failing(call, mode);
      std::string error;
      try {
        save(rank, t, folder, 2, me == bad_rank ? static_cast<Storage*>(&failing) : disk.get());
      } catch (const CheckpointError& e) {
        error = e.what();
      }
      // What a next run finds; the state is that of both steps, so either may be it.
      const std::int64_t found = load(rank, t, folder).manifest.position.step;
      if (found != 1 && found != 2) throw CheckpointError("neither step");
      if (state_of(rank) != state) throw CheckpointError("another state");
      const std::lock_guard lock(mutex);
      errors[call].push_back(error);
    }
  };
  run_training(small_config(), options);
  for (const auto& [call, both] : errors) {
    INFO("rank " << bad_rank << ", call " << call << ": " << both[0]);
    REQUIRE(both.size() == 2);
    CHECK(both[0] == both[1]);
    if (mode == FailingStorage::Mode::kDeath) continue;
    CHECK_THAT(both[0], ContainsSubstring("rank " + std::to_string(bad_rank) + ": "));
    CHECK_THAT(both[0], ContainsSubstring(dir / std::to_string(call)));
  }
  return needed;
}

}  // namespace

TEST_CASE("saved after step 3 and loaded into new objects, a run reaches step 8 with the uninterrupted run's bytes") {
  for (const Overrides& mapping : {kInterleaved, kZbv}) {
    const TraceRecords whole = run_training(test_config(mapping), {.steps = 8}).trace;
    for (const char* mode : {"execution.mode=eager", "execution.mode=graph"}) {
      INFO(mapping[0] << " " << mode);
      const Scratch dir;
      const Overrides cell = mapping + Overrides{mode};
      part_of_run(cell, dir / "c", 1, 3, true);
      require_equal(from_step(whole, 4), part_of_run(cell, dir / "c", 4, 8, false));
    }
  }
}

TEST_CASE("a chain of PP 1, 2, 4 and 2 with other schedules, chunks, slots and modes is the uninterrupted run") {
  const Overrides chain[] = {pipeline("1f1b", 1) + Overrides{"pipeline.backward=full"},
                             kZbv + Overrides{"execution.mode=graph"},
                             pipeline("interleaved_1f1b", 4, 2) + Overrides{"pipeline.tape_slots=per_microbatch"},
                             pipeline("zb1p", 2, 1) + Overrides{"execution.mode=graph"}};
  const TraceRecords whole = run_training(test_config({}), {.steps = 8}).trace;
  const Scratch dir;
  TraceRecords parts;
  std::uint32_t first = 1;
  for (const Overrides& link : chain) {
    parts.merge(part_of_run(link, dir / "c", first, first + 1, true));
    first += 2;
  }
  require_equal(whole, parts);
}

TEST_CASE("placements, moments in BF16, a dynamic head and BF16 layers survive a restart under another cut") {
  const std::pair<Overrides, Overrides> cases[] = {
      {kZbv + Overrides{"gradients.placement=copied"}, kInterleaved + Overrides{"gradients.placement=arena"}},
      {kZbv + Overrides{"optimizer.moments_dtype=bf16"}, Overrides{"optimizer.moments_dtype=bf16"}},
      {kZbv + Overrides{"head.precision=fp8_dynamic"}, Overrides{"head.precision=fp8_dynamic"}},
      {kZbv + Overrides{"precision.compute=bf16"}, Overrides{"precision.compute=bf16"}},
      {kZbv + Overrides{"precision.bf16_layers=[0,2,3]"}, kInterleaved + Overrides{"precision.bf16_layers=[0,2,3]"}}};
  for (const auto& [before, after] : cases) {
    const Scratch dir;
    const TraceRecords whole = run_training(test_config(after), {.steps = 4}).trace;
    part_of_run(before, dir / "c", 1, 2, true);
    require_equal(from_step(whole, 3), part_of_run(after, dir / "c", 3, 4, false));
  }
}

TEST_CASE("two replicas restart as two replicas under another schedule, and load what one saved") {
  const Overrides two{"parallel.data=2", "training.global_batch_size=8"};
  const Scratch dir;
  const TraceRecords whole = run_training(test_config(two + kZbv), {.steps = 4}).trace;
  part_of_run(two + kZbv, dir / "c", 1, 2, true);
  require_equal(from_step(whole, 3), part_of_run(two, dir / "c", 3, 4, false));

  part_of_run({"training.global_batch_size=8"}, dir / "one", 1, 2, true);
  RunOptions options{.steps = 0, .trace = false};
  std::mutex mutex;
  std::vector<std::uint64_t> loaded;
  options.before_steps = [&](PipelineRank& rank, Transport& t) {
    load(rank, t, dir / "one");
    const std::lock_guard lock(mutex);
    loaded.push_back(rank.state_digest());
  };
  run_training(test_config(two), options);
  run_training(test_config({}), options);
  REQUIRE(loaded.size() == 3);
  CHECK((loaded[0] == loaded[1] && loaded[1] == loaded[2]));
}

TEST_CASE("a checkpoint before the first forward lists all scaling state, and starting from it is a fresh run") {
  const Config config = test_config(kZbv);
  const Scratch dir;
  const TraceRecords whole = run_training(config, {.steps = 5}).trace;
  RunOptions none{.steps = 0};
  none.before_steps = [&](PipelineRank& rank, Transport& t) { save(rank, t, dir / "c", 0); };
  run_training(config, none);
  const auto saved = digests(open_checkpoint(dir / "c/step_00000000"));
  std::size_t slots = 0;
  for (const auto& [name, digest] : saved) slots += name.starts_with("fp8.") && name.ends_with(".scale");
  CHECK(slots == 8 * 4 * 3 + 3);  // input, weight and output gradient of each matrix product, the head's too
  RunOptions loaded{.steps = 5};
  loaded.before_steps = [&](PipelineRank& rank, Transport& t) { load(rank, t, dir / "c"); };
  require_equal(whole, run_training(config, loaded).trace);
}

TEST_CASE("a skipped step is remembered: Adam's t and the epoch part, and the restart agrees") {
  const Overrides skipping = kZbv + Overrides{"training.on_nonfinite=skip"};
  const Config config = test_config(skipping);
  const auto run = [&](int first, int last, const std::string& from, const std::string& to) {
    RunOptions o{.steps = last};
    o.first_step = static_cast<std::uint32_t>(first);
    if (!from.empty()) {
      o.before_steps = [&](PipelineRank& rank, Transport& t) {
        const FoundCheckpoint found = load(rank, t, from);
        if (rank.contract().epoch() != 2 || rank.applied_updates() != 1) throw CheckpointError("counts are mixed up");
      };
    }
    // The state after step 1 with a weight that is no number makes step 2 a skipped one; then the weight is put back.
    o.at_boundary = [&](PipelineRank& rank, Transport& t, std::uint32_t step) {
      for (const StateEntry& e : rank.state()) {
        if (e.name != "master.layers.0.mlp.fc1.weight" || step > 2) continue;
        std::vector<unsigned char> bytes = rank.read(e);
        const float value = step == 1 ? std::numeric_limits<float>::quiet_NaN() : 0.25f;
        std::memcpy(bytes.data(), &value, sizeof value);
        rank.load(e, bytes);
      }
      if (step <= 2) rank.restore(rank.contract().epoch(), rank.applied_updates());
      if (step == 2 && !to.empty()) save(rank, t, to, step);
    };
    return run_training(config, o);
  };
  const Scratch dir;
  const RunOutcome whole = run(1, 4, "", "");
  REQUIRE(whole.scalars[1].skip != 0);
  REQUIRE(whole.scalars[2].skip == 0);
  run(1, 2, "", dir / "c");
  require_equal(from_step(whole.trace, 3), run(3, 4, dir / "c", "").trace);
}

TEST_CASE("an evaluation before saving does not show in the files") {
  const Config config = test_config(kZbv);
  const Scratch dir;
  for (const bool evaluates : {false, true}) {
    RunOptions options{.steps = 1, .trace = false};
    options.at_boundary = [&](PipelineRank& rank, Transport& t, std::uint32_t step) {
      const Batch batch = synthetic_batch(config, 99);
      if (evaluates) rank.evaluate(batch.tokens, batch.targets, 2);
      save(rank, t, evaluates ? dir / "b" : dir / "a", step);
    };
    run_training(config, options);
  }
  CHECK(digests(open_checkpoint(dir / "a/step_00000001")) == digests(open_checkpoint(dir / "b/step_00000001")));
}

TEST_CASE("weights alone start with fresh scaling state, and the first refresh sees the loaded weights") {
  const Config config = small_config();
  for (const float factor : {64.0f, 1.0f / 64}) {
    const Scratch dir;
    RunOptions scaled{.steps = 2, .trace = false};
    scaled.at_boundary = [&](PipelineRank& rank, Transport& t, std::uint32_t step) {
      if (step != 2) return;
      for (const StateEntry& e : rank.state()) {
        if (!e.name.starts_with("master.")) continue;
        std::vector<unsigned char> bytes = rank.read(e);
        for (std::size_t i = 0; i < bytes.size(); i += 4) {
          float v = 0;
          std::memcpy(&v, bytes.data() + i, 4);
          v *= factor;
          std::memcpy(bytes.data() + i, &v, 4);
        }
        rank.load(e, bytes);
      }
      save(rank, t, dir / "c", step);
    };
    run_training(config, scaled);

    RunOptions fresh{.steps = 0, .trace = false};
    fresh.before_steps = [&](PipelineRank& rank, Transport& t) {
      const auto initial = state_of(rank);
      const FoundCheckpoint found = load(rank, t, dir / "c", Restored::kWeights);
      const auto stored = digests(found.manifest);
      for (const auto& [name, bytes] : state_of(rank)) {
        const bool as_expected =
            name.starts_with("master.") ? digest_of(bytes) == stored.at(name) : bytes == initial.at(name);
        if (!as_expected) throw CheckpointError(name + " is not what a start from weights has");
      }
      const Batch batch = synthetic_batch(config, 1);
      rank.evaluate(batch.tokens, batch.targets, 1);
      for (const StateEntry& e : rank.state()) {
        if (!e.first_is_derived || e.name.find("fc1") == std::string::npos) continue;
        const std::string layer = e.name.substr(4, e.name.find(".fc1") - 4);  // "fp8.layers.0.fc1.…"
        const auto master = state_of(rank).at("master." + layer + ".mlp.fc1.weight");
        float amax = 0;
        for (std::size_t i = 0; i < master.size(); i += 4) {
          float v = 0;
          std::memcpy(&v, master.data() + i, 4);
          amax = std::max(amax, std::fabs(round_bf16(v)));
        }
        if (*e.view.as<float>() != amax) throw CheckpointError(e.name + " does not hold the loaded weight's amax");
      }
    };
    run_training(config, fresh);
  }
}

TEST_CASE("a call of the file system that fails on one rank is an error on all, and the last checkpoint loads") {
  CHECK(failing_saves(0, FailingStorage::Mode::kError) > 20);
  CHECK(failing_saves(1, FailingStorage::Mode::kError) > 10);
}

TEST_CASE("a rank that dies at any moment of a save leaves a checkpoint that loads") {
  CHECK(failing_saves(0, FailingStorage::Mode::kDeath) > 20);
}

TEST_CASE("retention keeps the newest and every n-th, and never gives up the last finite one") {
  const Scratch dir;
  RunOptions options{.steps = 1, .trace = false};
  std::vector<std::vector<std::int64_t>> seen;
  options.at_boundary = [&](PipelineRank& rank, Transport& t, std::uint32_t) {
    const bool leads = t.rank(Group::kWorld) == 0;
    const auto note = [&](const std::string& folder) {
      if (leads) seen.push_back(steps_in(folder));
      t.barrier(Group::kWorld);
    };
    for (int step = 1; step <= 6; ++step) save(rank, t, dir / "two", step, nullptr, {2, 0});
    note(dir / "two");
    for (int step = 1; step <= 6; ++step) save(rank, t, dir / "every", step, nullptr, {1, 3});
    note(dir / "every");
    const StateEntry e = rank.state().front();
    std::vector<unsigned char> bytes = rank.read(e);
    const float nan = std::numeric_limits<float>::quiet_NaN();
    std::memcpy(bytes.data(), &nan, sizeof nan);
    rank.load(e, bytes);
    for (int step = 7; step <= 10; ++step) {
      if (save(rank, t, dir / "two", step, nullptr, {1, 0}).finite) throw CheckpointError("NaN is not finite");
    }
    note(dir / "two");
    if (find_checkpoint(t, dir / "two", "latest")->manifest.position.step != 6) throw CheckpointError("not step 6");
    if (find_checkpoint(t, dir / "two", "10")->manifest.finite) throw CheckpointError("not finite by name");
  };
  run_training(small_config(), options);
  REQUIRE(seen.size() == 3);
  CHECK(seen[0] == std::vector<std::int64_t>{5, 6});
  CHECK(seen[1] == std::vector<std::int64_t>{3, 6});
  CHECK(seen[2] == std::vector<std::int64_t>{6, 7, 8, 9, 10});
  CHECK(pointed_at(dir / "two") == 6);
}

TEST_CASE("saving is refused while a tape is live") {
  RunOptions options{.steps = 0, .trace = false};
  const Scratch dir;
  options.before_steps = [&](PipelineRank& rank, Transport& t) {
    for (const CacheLayout layout : {CacheLayout::kRowwise, CacheLayout::kColumnwise, CacheLayout::kBf16Copies}) {
      rank.contract().mark_refreshed(StageIndex{0}, layout);
    }
    rank.contract().begin(parse_action("0F0")).commit();
    save(rank, t, dir / "c", 1);
  };
  CHECK_THROWS_AS(run_training(test_config({}), options), ContractViolation);
  CHECK(steps_in(dir / "c").empty());
}

TEST_CASE("a model that does not fit is refused with the tensors, on every rank alike") {
  const Scratch dir;
  part_of_run({}, dir / "c", 1, 1, true);
  const std::pair<Overrides, std::string> cases[] = {
      {{"model.ffn_hidden_size=192"}, "fc1.weight is 176 x 64, wanted 192 x 64"},
      {{"model.num_layers=9"}, "master.layers.8.attention.query.weight is missing"},
      {{"model.num_layers=7"}, "tensors and this model"},
      {{"fp8.amax_history_len=16"}, "amax_history is 1 x 4, wanted 1 x 16"},
      {{"optimizer.moments_dtype=bf16"}, "is F32, wanted BF16"}};
  for (const auto& [overrides, message] : cases) {
    RunOptions options{.steps = 0, .trace = false};
    std::mutex mutex;
    std::vector<std::string> errors;
    options.before_steps = [&](PipelineRank& rank, Transport& t) {
      const auto found = find_checkpoint(t, dir / "c", "1");
      std::string error;
      try {
        load_checkpoint(t, rank, *found, Restored::kEverything);
      } catch (const CheckpointError& e) {
        error = e.what();
      }
      const std::lock_guard lock(mutex);
      errors.push_back(error);
    };
    run_training(test_config(pipeline("1f1b", 2) + overrides), options);
    INFO(errors[0]);
    CHECK(errors[0] == errors[1]);
    CHECK_THAT(errors[0], ContainsSubstring(message));
  }
}

}  // namespace qe::testing
